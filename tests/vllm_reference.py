"""Run by tests in a process of its own: what plain `vllm.LLM` makes of prompts and conversations one by one, as JSON on the last line."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Read the model, engine arguments, prompts, conversations (messages and `LLM.chat`'s keywords) and token limits from stdin."""
    asked = json.load(sys.stdin)
    llm = LLM(asked["model"], **asked["engine_args"])
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
    short = SamplingParams(temperature=0, max_tokens=asked["chat_max_tokens"])
    generated = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in asked["prompts"]]
    chatted = [llm.chat(messages, short, use_tqdm=False, **keywords)[0] for messages, keywords in asked["conversations"]]
    told = [
        {
            "prompt": output.prompt,
            "text": output.outputs[0].text,
            "token_ids": list(output.outputs[0].token_ids),
            "prompt_token_ids": output.prompt_token_ids,
            "finish_reason": output.outputs[0].finish_reason,
        }
        for output in [*generated, *chatted]
    ]
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
