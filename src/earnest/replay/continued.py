"""What an answer in the middle of a conversation is worth, by an environment's own reward.

The environment is started again. It gets the trace's turns up to this one and must reply as in the trace; then it gets
the answer, and its ``oracle`` goes on to the end. So an answer is worth less only if it spoils what can still be won.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from earnest.replay.local import UnusableTurn
from earnest.replay.traces import AssistantTurn, Message
from earnest.tasks import Environment, Prompt
from earnest.tasks.playing import play, run_to_end

MORE_TURNS = 8
"""Turns that the oracle may take after the answer."""


def reward_after(environment: Environment, turn: AssistantTurn, answer: Message, data: Mapping[str, Any]) -> float:
    """The reward of the conversation with ``answer`` at this turn; ``data`` are those of the trace's prompt."""
    given = [message for message in (*turn.state, answer) if message["role"] == "assistant"]
    opening = next(i for i, message in enumerate(turn.trace.messages) if message["role"] == "assistant")
    prompt = Prompt(turn.trace.id, turn.trace.messages[:opening], data)
    oracle = getattr(environment, "oracle", None)
    taken = 0

    def policy(prompt: Prompt, history: tuple[Message, ...]) -> Message:
        nonlocal taken
        if taken < len(given):
            if _read(history) != _read(turn.state[: len(history)]):
                raise UnusableTurn(f"the environment {environment.name} replies in another way than in the trace")
            taken += 1
            return as_called(given[taken - 1])
        if oracle is None:
            raise UnusableTurn(
                f"the conversation goes on after this answer, and the environment {environment.name} has no oracle to "
                "end it"
            )
        return dict(oracle(prompt, history))

    try:
        _, grade = run_to_end(play(environment, prompt, policy, max_turns=len(given) + MORE_TURNS))
    except UnusableTurn:
        raise
    except Exception as error:  # an environment is foreign code and may raise anything
        raise UnusableTurn(f"the environment {environment.name} raised {type(error).__name__}: {error}") from error
    if taken < len(given):
        raise UnusableTurn(f"the environment {environment.name} ends the conversation before this turn")
    return grade.reward


def as_called(message: Message) -> dict[str, Any]:
    """A trace's message as an environment gets it: arguments as a mapping, and a sentence for each malformed call."""
    made: dict[str, Any] = {**message, "content": message.get("content") or ""}
    calls, errors = [], []
    for call in made.pop("tool_calls", None) or ():
        try:
            arguments = json.loads(call["function"]["arguments"])
            if not isinstance(arguments, dict):
                raise ValueError("they are no object")
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        except ValueError as error:
            errors.append(f"The tool call cannot be read: the arguments of {call['function']['name']} ({error}).")
    return made | ({"tool_calls": calls} if calls else {}) | ({"tool_call_errors": errors} if errors else {})


def _read(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """What the policy read: the messages of the others."""
    return [(m["role"], str(m.get("content") or "")) for m in messages if m["role"] != "assistant"]
