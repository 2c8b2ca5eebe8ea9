"""From feedback to rows of a batch.

    text            the rollout itself; its teacher is the policy shown the text in hindsight
    thumbs          the rollout with advantage ±1; its teacher is shown the thumb's words; an upvoted one is also a
                    demonstration
    better answer   the rollout, its teacher shown the better answer; a demonstration; a pair (better, given)

The roles that the objective's live terms read decide which of these rows are made. A feedback without such a row is not
learned from, and its note has the reason; nor is a feedback on a prompt that the gate holds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from earnest.data import TemplateError, hindsight, reprompt
from earnest.objectives import Objective
from earnest.serve.errors import ServeError
from earnest.serve.learning import LearnConfig
from earnest.serve.rows import FeedbackRow, Status, StoredCompletion
from earnest.serve.scoring import answer_tokens
from earnest.serve.state import State
from earnest.signals import Batch, Role


@dataclass(frozen=True)
class LessonRow:
    """One row of a batch; ``teacher_prompt`` is the prompt that the teacher reads."""

    role: Role
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    behaviour: tuple[float, ...]
    temperature: float
    version: int
    teacher_prompt: tuple[int, ...] | None = None
    advantage: float = 0.0
    correct: bool = False
    pair: int = -1


@dataclass(frozen=True)
class Lessons:
    """The rows of a version, the feedback they come from, and the status of the other feedback."""

    rows: tuple[LessonRow, ...]
    taken: tuple[tuple[FeedbackRow, StoredCompletion], ...]
    others: Mapping[int, tuple[Status, str]] = field(default_factory=dict)


def gather(state: State, config: LearnConfig, objective: Objective, feedback: Sequence[FeedbackRow]) -> Lessons:
    """Rows of each feedback, in order."""
    rows: list[LessonRow] = []
    taken: list[tuple[FeedbackRow, StoredCompletion]] = []
    others: dict[int, tuple[Status, str]] = {}
    held_out = {_plain(pair.prompt) for pair in config.gate.pairs}
    for f in feedback:
        given = state.store.completion(f.completion, f.choice)
        asked = [m["content"] for m in given.messages if m["role"] == "user"]  # none in a plain text
        asked = asked if given.kind == "chat" else [state.text.decode(given.prompt)]
        if held_out and not held_out.isdisjoint(map(_plain, asked)):
            others[f.seq] = (
                "unused",
                "its prompt is one of gate.pairs, which are held out: learning from it would let "
                "the gate judge what was taught",
            )
            continue
        try:
            own = _rows(state, config, objective, f, given, len(taken))
            _fit(state, own)
        except (ServeError, TemplateError) as error:
            others[f.seq] = ("failed", str(error))
            continue
        if not own:
            kinds = ", ".join(w.term.kind for w in objective.live())
            others[f.seq] = ("unused", f"the objective ({kinds}) does not use feedback of this kind")
            continue
        rows += own
        taken.append((f, given))
    return Lessons(tuple(rows), tuple(taken), others)


def _plain(text: str) -> str:
    """The text without case and extra spaces, which do not make another prompt."""
    return " ".join(text.casefold().split())


def _rows(
    state: State, config: LearnConfig, objective: Objective, f: FeedbackRow, given: StoredCompletion, number: int
) -> list[LessonRow]:
    roles, wanted = objective.wants().roles, objective.signals()
    common = (given.temperature, given.version)
    better: tuple[int, ...] | None = None  # as the policy would have given it
    if f.better is not None and given.kind == "chat":
        better = answer_tokens(state, given.messages, f.better, given.sampling.get("tools", ()))[1]
    elif f.better is not None:
        better = state.text.encode(f.better, special=False)
    silent = (0.0,) * len(better or ())  # it was not sampled; no term reads its behaviour log-probs
    found: list[LessonRow] = []
    rating = {"up": 1.0, "down": -1.0, None: 0.0}[f.thumbs]
    if "rollout" in roles and ("teacher" in wanted or rating):
        seen = _teacher_prompt(state, config, f, given) if "teacher" in wanted else None
        found.append(
            LessonRow("rollout", given.prompt, given.tokens, given.logprobs, *common, seen, rating, f.thumbs == "up")
        )
    if "demonstration" in roles and better is not None:
        found.append(LessonRow("demonstration", given.prompt, better, silent, *common, correct=True))
    elif "demonstration" in roles and f.thumbs == "up":
        found.append(LessonRow("demonstration", given.prompt, given.tokens, given.logprobs, *common, correct=True))
    if roles & {"chosen", "rejected"} and better is not None:
        found.append(LessonRow("chosen", given.prompt, better, silent, *common, correct=True, pair=number))
        found.append(LessonRow("rejected", given.prompt, given.tokens, given.logprobs, *common, pair=number))
    return found


def _teacher_prompt(state: State, config: LearnConfig, f: FeedbackRow, given: StoredCompletion) -> tuple[int, ...]:
    """The prompt that the teacher reads. For a plain text the feedback is above the text, since the answer continues
    it."""
    thumb = config.thumbs.up if f.thumbs == "up" else config.thumbs.down
    said = f.text if f.text is not None else thumb

    def framed(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        return reprompt(messages, f.better, f.text) if f.better is not None else hindsight(messages, said)

    if given.kind == "chat":
        return state.text.render(framed(given.messages), tools=given.sampling.get("tools", ()))
    above = framed([{"role": "user", "content": ""}])[0]["content"].strip() + "\n\n"
    opening = state.text.encode("")  # special tokens that open every text stay in front
    shared = len(opening) if given.prompt[: len(opening)] == opening else 0
    return (*given.prompt[:shared], *state.text.encode(above, special=False), *given.prompt[shared:])


def _fit(state: State, rows: Sequence[LessonRow]) -> None:
    limit = state.host.policy.positions
    for row in rows:
        size = max(len(row.prompt), len(row.teacher_prompt or ())) + len(row.tokens) - 1
        if limit is not None and size > limit:
            raise TemplateError(
                f"the conversation, the feedback and the answer have {size} tokens together; "
                f"{state.host.policy.name} has {limit} positions."
            )


def batches(state: State, rows: Sequence[LessonRow]) -> list[tuple[Batch, list[tuple[int, ...] | None]]]:
    """A batch for each sampling temperature (a batch has one), and the teacher's prompts of its rows."""
    by_temperature: dict[float, list[LessonRow]] = {}
    for row in rows:
        by_temperature.setdefault(row.temperature, []).append(row)
    policy = state.host.policy
    return [
        (
            Batch.from_rows(
                [r.prompt for r in own],
                [r.tokens for r in own],
                role=[r.role for r in own],
                pair=[r.pair for r in own],
                policy_version=[r.version for r in own],
                behaviour=[r.behaviour for r in own],
                advantages=[r.advantage for r in own],
                correct=[r.correct for r in own],
                temperature=temperature,
                pad=policy.pad_id,
                device=policy.device,
            ),
            [r.teacher_prompt for r in own],
        )
        for temperature, own in by_temperature.items()
    ]
