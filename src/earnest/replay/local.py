"""A policy on this machine as teacher and as judge.

A judge with hindsight scores an answer by its mean log-prob after a prompt that contains the user's next message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earnest.data import hindsight
from earnest.replay.endpoint import Usage
from earnest.replay.traces import AssistantTurn, Message

CHUNK = 64
"""Prompts that are sampled together; the plan is always cut at the same places, so that a resumed replay samples the
same."""


class UnusableTurn(Exception):
    """This policy cannot answer this turn; the reason goes into the report."""


@dataclass(frozen=True)
class Answered:
    """A policy's answer, or why there is none; and its cost."""

    message: Message | None
    why: str
    usage: Usage


def hindsight_messages(turn: AssistantTurn) -> list[dict[str, Any]]:
    """The state with a hint in its last user message: the user's next message, or what the turn's tools returned."""
    later = (turn.next_message or "").strip()
    if not later and not turn.results:
        raise UnusableTurn("no message follows")
    return hindsight(turn.state, later) if later else hindsight(turn.state, turn.results or "", by="tool")


class LocalPolicy:
    def __init__(self, model: str, adapter: str | None) -> None:
        from earnest.adapters.trained import load_trained
        from earnest.models import load

        self.policy = load(model) if adapter is None else load_trained(Path(adapter), model)[0]
        self.context = self.policy.positions or 2**31

    def prompt(self, turn: AssistantTurn, with_hindsight: bool, room: int) -> list[int]:
        """The turn's state in tokens, with ``room`` left after it."""
        messages = hindsight_messages(turn) if with_hindsight else list(turn.state)
        try:
            ids = self.policy.render(messages, tools=turn.trace.tools or None)
        except Exception as error:  # a chat template is foreign code and may raise anything
            raise UnusableTurn(f"the chat template refuses the state: {error}") from error
        if len(ids) + room > self.context:
            raise UnusableTurn(f"longer than the policy's context of {self.context} tokens")
        return ids

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        temperature: float,
        max_tokens: int,
        seed: int,
        tools: Sequence[Sequence[Message]] = (),
    ) -> list[list[Answered]]:
        """``samples`` answers to each prompt; ``tools`` are the schemas that each prompt has."""
        from earnest.models import SampleSpec, sample

        spec = SampleSpec(max_new_tokens=max_tokens, temperature=temperature, seed=seed)
        found: list[list[Answered]] = [[] for _ in prompts]
        for completion in sample(self.policy, prompts, samples, spec):
            number = completion.prompt_index
            message, why = None, f"cut off at {max_tokens} tokens"
            if completion.finish == "stop":
                message, why = self.read(prompts[number], completion.tokens, tools[number] if tools else ())
            usage = Usage(1, len(prompts[number]), len(completion.tokens))
            found[number].append(Answered(message, why, usage))
        return found

    def read(
        self, prompt: Sequence[int], tokens: Sequence[int], tools: Sequence[Message] = ()
    ) -> tuple[Message | None, str]:
        """An assistant message from its tokens, calls included, in the format of the policy's chat template; or why it
        cannot be read. A call's arguments are JSON as text, as in a trace."""
        from earnest.models.tool_calls import read_message

        message = read_message(self.policy, prompt, tokens, tools)
        if message.pop("tool_call_errors", None):
            return None, "its tool call cannot be read"
        content, calls = str(message["content"]).strip(), message.get("tool_calls") or []
        if not content and not calls:
            return None, "it is empty"
        for call in calls:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return message | {"content": content or None}, ""

    def reply(self, turn: AssistantTurn, answer: Message) -> list[int]:
        """An answer to the turn's state in tokens, its end of turn included."""
        from earnest.models.replies import message_tokens

        try:
            return message_tokens(self.policy, turn.state, answer, tools=turn.trace.tools or None)[1]
        except Exception as error:
            raise UnusableTurn(f"the chat template refuses the answer: {error}") from error

    def score(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """The mean log-prob of each completion after its prompt."""
        import torch

        from earnest.engines.scoring import at_ids
        from earnest.signals import Batch

        found: list[float] = []
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            batch = Batch.from_rows(
                [p for p, _ in part], [c for _, c in part], pad=self.policy.pad_id, device=self.policy.device
            )
            with torch.no_grad():
                hidden = self.policy.hidden(batch.inputs)[batch.row, batch.position]
                lp = at_ids(hidden, self.policy.head, batch.token_target[:, None])[:, 0].double()
            for r in range(len(part)):
                found.append(float(lp[batch.row == r].mean()))
        return found
