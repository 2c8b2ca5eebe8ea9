"""Which of two answers is better, and by how much. A margin above 0 is for the teacher's answer.

likelihood   mean log-prob of the teacher's answer minus that of the trace's, under a policy with hindsight
endpoint     an LLM compares twice, with the answers in both orders: +1, -1, or 0 where it contradicts itself
task         the grader's reward of the teacher's answer minus that of the trace's; in an environment, that of the
             conversation after each of them (``continued.py``)
teacher      +1, without a comparison
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from earnest.replay.continued import reward_after
from earnest.replay.endpoint import Endpoint, Usage
from earnest.replay.local import LocalPolicy, UnusableTurn
from earnest.replay.traces import AssistantTurn, Message, plain_text
from earnest.tasks import Environment, Prompt, Task, get_task, is_environment

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
