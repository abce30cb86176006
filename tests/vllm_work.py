"""What the tests on real vLLM ask of plain `LLM` and of the pool alike."""

from __future__ import annotations

from typing import Any

from enginepool import Output, SamplingParams
from enginepool.preflight.dtype import is_bfloat16_slow

DTYPE = "float32" if is_bfloat16_slow() else "bfloat16"
ENGINE_ARGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "enforce_eager": True, "dtype": DTYPE}
KV_BYTES = 256 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SHORT = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time there was",
    "The three primary colours are",
    "In 1969, the first human",
    "To make a cup of tea, first",
    "The opposite of hot is",
    "A list of fruits: apple,",
    "My favourite season is",
]
WEATHER_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_PARAMETERS}}
ECHO_TOOLS = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{{ tools }}{{ style }}"


def tool_turns(arguments: str, **tool: Any) -> list[dict[str, Any]]:
    """A conversation with a tool call, as OpenAI's API has it: the assistant's content is null."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "How is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"} | tool,
    ]


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([{"role": "user", "content": "What is the capital of France?"}], {}),
    "system": ([{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is snow white?"}], {}),
    "developer": ([{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hello"}], {}),
    "content list": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    "empty list": ([{"role": "user", "content": []}], {}),
    "empty text": ([{"role": "user", "content": ""}], {}),
    "no content": ([{"role": "user"}], {}),
    "tool call": (tool_turns('{"city": "Rome"}'), {"tools": [WEATHER]}),
    "null arguments": (tool_turns("null"), {}),
    "no arguments": (tool_turns(""), {}),
    "broken arguments": (tool_turns("{bad"), {}),
    "no tool id": (tool_turns("{}", tool_call_id=None), {}),
    "no generation prompt": ([{"role": "user", "content": "Hello"}], {"add_generation_prompt": False}),
    "continued": (
        [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The river"}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "own template": (
        [{"role": "user", "content": "Hello"}],
        {"chat_template": ECHO_TOOLS, "tools": [WEATHER], "chat_template_kwargs": {"style": "brief"}},
    ),
}


def told_of(output: Output) -> dict[str, Any]:
    """What an output is compared by; the same as vllm_reference.py tells."""
    return {
        "prompt": output.prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": output.finish_reason,
    }
