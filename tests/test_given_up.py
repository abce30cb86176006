"""What vLLM says in its log of a request that it gives up becomes the words of that item's error."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from enginepool.errors import Code
from enginepool.worker.given_up import GivenUp

COMPILER = logging.getLogger("vllm.v1.structured_output")
SCHEDULER = logging.getLogger("vllm.v1.core.sched.scheduler")


@pytest.fixture
def given_up() -> Iterator[GivenUp]:
    """A listener on the real loggers' names."""
    listener = GivenUp()
    yield listener
    listener.close()


def _fail_to_compile(name: str, text: str) -> None:
    try:
        raise RuntimeError(text)
    except RuntimeError:
        COMPILER.exception("Failed to compile grammar for request %s", name)


def test_cause_of_a_compilation_is_told_without_its_place(given_up: GivenUp) -> None:
    _fail_to_compile("7-ab12", "[01:09:43] /project/cpp/regex_converter.cc:83: Escape sequence is not finished.\n")
    error = given_up.error_of(7, is_structured=True)
    assert error.code is Code.INVALID_REQUEST
    assert error.message == "structured_outputs could not be compiled or followed: Escape sequence is not finished."


def test_cause_of_one_sample_is_that_of_its_item(given_up: GivenUp) -> None:
    SCHEDULER.error("Unexpected: grammar rejected tokens %s for request %s. Terminating request.", [0], "2_17-ab12")
    assert "grammar rejected tokens [0]" in given_up.error_of(17, is_structured=True).message


def test_cause_of_a_later_prompt_is_that_of_its_item(given_up: GivenUp) -> None:
    _fail_to_compile("17.3-ab12", "the fourth prompt's")
    assert given_up.error_of(17, is_structured=True).message.endswith("the fourth prompt's")


def test_cause_of_another_item_is_not_taken(given_up: GivenUp) -> None:
    _fail_to_compile("17-ab12", "not mine")
    assert given_up.error_of(7, is_structured=True).message.endswith("the worker's log says why")


def test_cause_is_told_once(given_up: GivenUp) -> None:
    _fail_to_compile("7-ab12", "mine")
    assert given_up.error_of(7, is_structured=True).message.endswith("mine")
    assert not given_up.error_of(7, is_structured=True).message.endswith("mine")


def test_causes_nobody_asks_for_do_not_pile_up(given_up: GivenUp) -> None:
    for number in range(1000):
        _fail_to_compile(f"{number}-ab12", "aborted meanwhile")
    assert len(given_up._causes) == 256
    assert given_up.error_of(999, is_structured=True).message.endswith("aborted meanwhile")


def test_item_without_structured_outputs_is_an_engine_error(given_up: GivenUp) -> None:
    error = given_up.error_of(7, is_structured=False)
    assert (error.code, error.is_retryable, error.blame) == (Code.ENGINE_ERROR, True, "pool")


def test_other_log_lines_and_a_closed_listener_keep_nothing(given_up: GivenUp) -> None:
    SCHEDULER.error("Something else went wrong")
    given_up.close()
    _fail_to_compile("7-ab12", "too late")
    assert given_up._causes == {}
