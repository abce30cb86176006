"""Refuses structured outputs that an engine's grammar backend would not compile, or would compile without some of their rules.

vLLM 0.32 checks each request with the backend that suits it, but compiles all of an engine's requests with the one that its first
request was checked with.
"""

from __future__ import annotations

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from enginepool.worker.given_up import without_place

# vLLM's own checks; what the other backends can't take is left to their compilation.
_CHECKS = {"xgrammar": validate_xgrammar_grammar, "guidance": validate_guidance_grammar}


class GrammarBackend:
    """Which backend this engine compiles with; what it refuses is refused at admission."""

    def __init__(self) -> None:
        self._name: str | None = None

    def check(self, params: SamplingParams) -> None:
        """Look at params that vLLM has accepted. Raises VLLMValidationError for what only another backend has found good."""
        chosen = None if params.structured_outputs is None else params.structured_outputs._backend
        self._name = self._name or chosen
        if chosen is None or chosen == self._name or self._name not in _CHECKS:
            return
        try:
            _CHECKS[self._name](params)
        except (VLLMValidationError, ValueError) as error:
            why = f"this engine compiles with {self._name}, as its first such request asked for, and this one needs {chosen}"
            way_out = f"set structured_outputs_config={{'backend': {chosen!r}}} for the pool"
            raise VLLMValidationError(f"structured_outputs: {without_place(error)} ({why}: {way_out})") from error
