"""A reply as tokens, as the policy's chat template writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from earnest.errors import ConfigError
from earnest.models.protocol import PolicyLike


def reply_tokens(policy: PolicyLike, messages: Sequence[Mapping[str, Any]], text: str) -> tuple[list[int], list[int]]:
    """(prompt, reply) as tokens; the reply ends with the end-of-turn token."""
    return message_tokens(policy, messages, {"role": "assistant", "content": text})


def message_tokens(
    policy: PolicyLike,
    messages: Sequence[Mapping[str, Any]],
    reply: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
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
    return asked, tokens[
        : ends[-1] + 1
    ]  # without the line break that templates add after the end of a turn: it is not sampled
