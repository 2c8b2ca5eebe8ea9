"""A reply as tokens, as the policy's chat template writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from earnest.errors import ConfigError
from earnest.models.protocol import PolicyLike
from earnest.models.speech import Messages


def reply_tokens(policy: PolicyLike, messages: Messages, text: str) -> tuple[list[int], list[int]]:
    """(prompt, reply) as tokens; the reply ends with the end-of-turn token."""
    return message_tokens(policy, messages, {"role": "assistant", "content": text})


def message_tokens(
    policy: PolicyLike, messages: Messages, reply: Mapping[str, Any], tools: Messages | None = None
) -> tuple[list[int], list[int]]:
    """(prompt, reply) for a whole assistant message, with its tool calls in the reply."""
    asked = policy.render(messages, tools=tools)
    whole = policy.render([*messages, reply], tools=tools, add_generation_prompt=False)
    if whole[: len(asked)] != asked:
        raise ConfigError(
            f"model: the chat template of {policy.name} writes a prompt differently before an answer; use another."
        )
    tokens = whole[len(asked) :]
    ends = [i for i, token in enumerate(tokens) if token in policy.eos_ids]
    if not ends:
        raise ConfigError(
            f"model: the chat template of {policy.name} never ends a turn, so no answer learns to stop; use another."
        )
    # without the line break that templates add after the end of a turn: it is not sampled
    return asked, tokens[: ends[-1] + 1]
