"""A turn that calls a tool, on the chat templates of real models: what was sampled stays as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from earnest.models.tool_calls import read_message
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.transcript import Transcript
from tests.data.test_rendering import policy as with_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
ASKED = {"role": "user", "content": "What is one plus two?"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
SEEN = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"}
# file → the token that ends a turn with a call, and the rows of the conversation: two if the call is written anew
REAL = {
    "qwen2_5": ("<|im_end|>", 1),
    "qwen3": ("<|im_end|>", 2),
    "qwen3_instruct_2507": ("<|im_end|>", 1),
    "qwen3_vl": ("<|im_end|>", 1),
    "qwen3_5_think": ("<|im_end|>", 1),
    "qwen3_6": ("<|im_end|>", 1),
    "llama3_1": ("<|eot_id|>", 1),
    "llama3_2": ("<|eot_id|>", 1),
    "gemma4": ("<|tool_response>", 1),
    "gptoss": ("<|call|>", 1),
    "glm4moe": ("<|observation|>", 2),
    "nemotron_3_nano": ("<|im_end|>", 2),
}


@dataclass
class Templated:
    """nano's tokenizer with another model's template, as a transcript reads a policy."""

    name: str
    tokenizer: Any
    eos_ids: set[int]

    def render_text(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def render(self, messages: Any, *, tools: Any = None) -> list[int]:
        return list(self.encode(self.render_text(messages, tools=tools)))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode([i for i in ids if i not in self.eos_ids], skip_special_tokens=True))


def templated(name: str) -> Any:
    made = with_template(name, REAL[name][0])
    return Templated(name, made.tokenizer, made.eos_ids)


@pytest.mark.parametrize("name", REAL)
def test_a_turn_with_a_call_stays_as_it_was_sampled(name: str) -> None:
    end, rows = REAL[name]
    policy = templated(name)
    transcript = Transcript(policy, [ASKED], TOOLS)
    prompt = transcript.prompt
    asked = policy.render_text([ASKED], tools=TOOLS)
    whole = policy.render_text(
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}], tools=TOOLS, add_generation_prompt=False
    )
    pairs = enumerate(zip(asked, whole, strict=False))
    written = whole[next((i for i, (a, b) in pairs if a != b), len(asked)) :].rstrip().removesuffix(end)
    sampled = (*policy.encode(written), *policy.eos_ids)
    message = read_message(policy, prompt, sampled, TOOLS)
    assert [c["function"] for c in message["tool_calls"]] == [CALL["function"]]
    transcript.turn(Rollout(0, 0, prompt, sampled, (-1.0,) * len(sampled), "stop", 0, 1.0), message)
    transcript.observe([SEEN])
    read = str(policy.tokenizer.decode(transcript.prompt, skip_special_tokens=False))
    assert read.split() == policy.render_text(transcript.messages, tools=TOOLS).split()
    assert len(transcript.rows) == rows
    first = tuple(token for segment in transcript.rows[0] for token in segment.tokens)
    assert first[: len(prompt) + len(sampled)] == prompt + sampled
