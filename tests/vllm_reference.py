"""Run by tests in a process of its own: what plain `vllm.LLM` makes of prompts one by one, as JSON on the last line."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Read the model, engine arguments, prompts and token limit from stdin."""
    asked = json.load(sys.stdin)
    llm = LLM(asked["model"], **asked["engine_args"])
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in asked["prompts"]]
    told = [
        {
            "text": output.outputs[0].text,
            "token_ids": list(output.outputs[0].token_ids),
            "prompt_token_ids": output.prompt_token_ids,
            "finish_reason": output.outputs[0].finish_reason,
        }
        for output in outputs
    ]
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
