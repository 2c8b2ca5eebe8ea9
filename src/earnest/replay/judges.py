"""Which of two answers is better, and by how much. A margin above 0 is for the teacher's answer.

likelihood   mean log-prob of the teacher's answer minus that of the trace's, under a policy with hindsight
endpoint     an LLM compares twice, with the answers in both orders: +1, -1, or 0 where it contradicts itself
task         the grader's reward of the teacher's answer minus that of the trace's; in an environment, that of the
             conversation after each of them (``reward_after``)
teacher      +1, without a comparison
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earnest.replay.endpoint import Endpoint, Usage
from earnest.replay.local import LocalPolicy, UnusableTurn
from earnest.replay.traces import AssistantTurn, Message, plain_text
from earnest.tasks import Environment, Prompt, Task, get_task, is_environment
from earnest.tasks.playing import play, run_to_end

SYSTEM = "You compare two answers that an assistant could give next in a conversation. Judge by what helps the user."
QUESTION = """The conversation:
{conversation}
{hindsight}
Answer A:
{a}

Answer B:
{b}

Which answer is better? Reply with one word: A, B or tie."""
WORTH = {"a": 1.0, "b": -1.0, "tie": 0.0}
MORE_TURNS = 8
"""Turns that the oracle may take after the answer."""


@dataclass(frozen=True)
class AnswerComparison:
    """A teacher's answer beside what the trace has at this turn."""

    turn: AssistantTurn
    candidate: Message


def by_likelihood(policy: LocalPolicy, asked: Sequence[AnswerComparison]) -> list[float | str]:
    """A margin for each, or why there is none."""
    rows: list[tuple[list[int], list[int]]] = []
    found: list[float | str] = []
    for c in asked:
        try:
            replies = [policy.reply(c.turn, answer) for answer in (c.candidate, c.turn.answer)]
            prompt = policy.prompt(c.turn, True, max(map(len, replies)))
        except UnusableTurn as reason:
            found.append(str(reason))
            continue
        rows += [(prompt, reply) for reply in replies]
        found.append(0.0)
    scores = iter(policy.score(rows))
    return [value if isinstance(value, str) else next(scores) - next(scores) for value in found]


def by_grader(comparison: AnswerComparison, task: str | None) -> float:
    """Rewards by a task's grader; the grader reads the question's data from the trace's ``meta.data``."""
    turn = comparison.turn
    name, data = task or turn.trace.meta.get("task"), turn.trace.meta.get("data")
    if not isinstance(name, str) or not isinstance(data, dict):
        raise UnusableTurn("the trace has no meta.task and meta.data, so no grader can judge it")
    grader: Task | Environment = get_task(name)
    if is_environment(grader):
        better, worse = (reward_after(grader, turn, answer, data) for answer in (comparison.candidate, turn.answer))
        return better - worse
    if not turn.last:
        raise UnusableTurn("a grader judges the last answer of a trace")
    prompt = Prompt(turn.trace.id, turn.state, data)
    better, worse = (grader.grade(prompt, plain_text(m)).reward for m in (comparison.candidate, turn.answer))
    return better - worse


def by_endpoint(endpoint: Endpoint, comparison: AnswerComparison, name: str) -> tuple[float | str, Usage]:
    """Two questions, with the answers in both orders; a reply other than A, B or tie is no verdict."""
    turn = comparison.turn
    answers = plain_text(comparison.candidate), plain_text(turn.answer)
    later = f"\nWhat the user said afterwards:\n{turn.next_message}\n" if turn.next_message else ""
    conversation = "\n".join(f"{m['role']}: {plain_text(m)}" for m in turn.state)
    votes, used = [], []
    for sign, (a, b) in ((1.0, answers), (-1.0, answers[::-1])):
        text = QUESTION.format(conversation=conversation, hindsight=later, a=a, b=b)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        reply = endpoint.chat(messages, name=f"{name} judge {sign:+g}", temperature=0.0, max_tokens=8)
        used.append(reply.usage)
        word = str(reply.message.get("content") or "").strip().strip(".*\"'").lower()
        if word not in WORTH:
            return f"the judge replied {word[:40]!r} instead of A, B or tie", add(used)
        votes.append(sign * WORTH[word])
    return sum(votes) / 2, add(used)


def add(parts: Sequence[Usage]) -> Usage:
    """The sum; unknown where a part is."""

    def total(values: list[int | None]) -> int | None:
        known = [v for v in values if v is not None]
        return sum(known) if len(known) == len(values) else None

    return Usage(
        sum(p.tries for p in parts),
        total([p.prompt_tokens for p in parts]),
        total([p.completion_tokens for p in parts]),
    )


def reward_after(environment: Environment, turn: AssistantTurn, answer: Message, data: Mapping[str, Any]) -> float:
    """The reward of the conversation with ``answer`` at this turn; ``data`` are those of the trace's prompt. The
    environment is started again. It gets the trace's turns up to this one and must reply as in the trace; then it gets
    the answer, and its ``oracle`` goes on to the end. So an answer is worth less only if it spoils what can still be
    won."""
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
