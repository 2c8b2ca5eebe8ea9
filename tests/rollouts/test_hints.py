"""Hints at the turn that failed: what the teacher reads, which tokens it covers; demonstrations of an oracle."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

import earnest as en
from earnest.data import TemplateError, hinted
from earnest.errors import ConfigError
from earnest.models import Policy, SampleSpec
from earnest.models.replies import message_tokens
from earnest.rollouts import TurnSettings
from earnest.rollouts.attempts import Attempt
from earnest.rollouts.collecting import teacher_prompts
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.rows import demonstration, rollout_rows, stack
from earnest.rollouts.trajectory import Trajectory
from earnest.rollouts.transcript import Transcript
from earnest.signals import Batch, Hidden, with_teacher
from earnest.signals.teachers import TaughtTurn
from earnest.tasks import Grade
from earnest.tasks.environment import Message
from earnest.tasks.tool_tasks import CALCULATOR, LOOKUP, oracle

WRONG = "Error: there is no item lam."


@pytest.fixture(scope="module")
def engine() -> en.LocalEngine:
    policy = en.load("nano")
    return en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), targets=("q_proj",), seed=0))


def _call(item: str) -> Message:
    call = {"id": "call00000", "type": "function", "function": {"name": "price", "arguments": {"item": item}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _conversation(policy: Policy, turn: int | None) -> Attempt:
    """Three turns: a wrong call, a right call, an answer; the grade marks one of them."""
    prompt = LOOKUP.prompts("train", 1, 0)[0]
    transcript = Transcript(policy, prompt.messages, LOOKUP.tools)
    said = [_call("lam"), _call("lamp"), {"role": "assistant", "content": "It costs 3 coins."}]
    for number, message in enumerate(said):
        _, tokens = message_tokens(policy, transcript.messages, message, LOOKUP.tools)
        values = tuple(-0.1 for _ in tokens)
        transcript.turn(Rollout(0, 0, transcript.prompt, tuple(tokens), values, "stop", 0, 1.0), message)
        if number < 2:
            transcript.observe([{"role": "tool", "content": (WRONG, "3 coins")[number]}])
    rows, histories = transcript.finished()
    found = Trajectory(0, 0, rows, histories, tuple(transcript.messages), (0.0,) * 3, "answered", 1.0)
    return Attempt(prompt, found, "", Grade(0.0, WRONG, False, turn=turn))


def _batch(attempt: Attempt) -> Batch:
    return stack(rollout_rows(attempt.rollout), temperature=1.0, pad=0)


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("teach", ["turn", "onward"])
def test_the_teacher_covers_the_turn_that_failed(engine: en.LocalEngine, turn: int, teach: Any) -> None:
    attempt = _conversation(engine.policy, turn)
    batch = _batch(attempt)
    seen = teacher_prompts(engine.policy, [attempt], 1, LOOKUP.tools, TurnSettings(teach=teach))
    made = with_teacher(engine, batch, seen).teacher
    turns = list(attempt.rollout.turns())  # type: ignore[union-attr]
    sizes = [len(t.tokens) for t in turns]
    end = sum(sizes) if teach == "onward" else sum(sizes[: turn + 1])
    assert made is not None and made.at is not None
    assert made.at.tolist() == list(range(sum(sizes[:turn]), end))
    assert batch.token_target[made.at].tolist() == [x for t in turns[turn : None if teach == "onward" else turn + 1]
                                                    for x in t.tokens]  # fmt: skip


def test_the_teachers_distribution_is_that_after_the_hint(engine: en.LocalEngine) -> None:
    policy = engine.policy
    attempt = _conversation(policy, 1)
    made = with_teacher(engine, _batch(attempt), teacher_prompts(policy, [attempt], 1, LOOKUP.tools)).teacher
    rollout = attempt.rollout
    assert isinstance(rollout, Trajectory)
    before = [*rollout.messages[:2], {**rollout.messages[2], "content": f"{WRONG}\n\nHint: {WRONG}"}]
    prompt = policy.render(before, tools=LOOKUP.tools)
    turn = list(rollout.turns())[1]
    row = Batch.from_rows([prompt], [turn.tokens])
    want = with_teacher(engine, row, [prompt]).teacher
    assert made is not None and want is not None
    assert isinstance(made.distribution, Hidden) and isinstance(want.distribution, Hidden)
    torch.testing.assert_close(made.distribution.states, want.distribution.states)


def test_another_hint_is_another_teacher_and_a_template_of_ones_own_is_used(engine: en.LocalEngine) -> None:
    policy = engine.policy
    attempt = _conversation(policy, 0)
    other = replace(attempt, grade=replace(attempt.grade, feedback="The item is lamp."))
    (one,), (two,) = (teacher_prompts(policy, [a], 1, LOOKUP.tools) for a in (attempt, other))
    (own,) = teacher_prompts(policy, [other], 1, LOOKUP.tools, TurnSettings(hint=" ({hint})"))
    assert isinstance(one, TaughtTurn) and isinstance(two, TaughtTurn) and isinstance(own, TaughtTurn)
    assert one.prompt != two.prompt
    assert policy.decode(two.prompt).count("\n\nHint: The item is lamp.") == 1
    assert " (The item is lamp.)" in policy.decode(own.prompt)
    with pytest.raises(ConfigError, match="no place for the feedback"):
        TurnSettings(hint="Think.")


def test_without_a_marked_turn_the_whole_conversation_has_a_teacher(engine: en.LocalEngine) -> None:
    attempt = _conversation(engine.policy, None)
    (prompt,) = teacher_prompts(engine.policy, [attempt], 1, LOOKUP.tools)
    assert isinstance(prompt, list)


def test_a_hint_needs_a_message_to_stand_in() -> None:
    with pytest.raises(TemplateError, match="the message before the turn"):
        hinted([{"role": "assistant", "content": "hello"}], "no")


def test_a_collected_batch_reports_what_was_hinted(engine: en.LocalEngine) -> None:
    found = en.collect(
        engine, CALCULATOR, CALCULATOR.prompts("train", 2, 0), 2, SampleSpec(max_new_tokens=12, seed=1),
        objective=en.GRPO() + en.SDPO(), turns=TurnSettings(max_turns=2),
    )  # fmt: skip
    assert found.metrics["hinted_turns"] == 4  # nano has never seen a calculator: no conversation is right
    assert found.batch.teacher is not None and found.batch.teacher.at is not None
    assert found.metrics["hinted_tokens"] == len(found.batch.teacher.at)


def test_an_oracle_demonstrates_whole_conversations(engine: en.LocalEngine) -> None:
    policy = engine.policy
    prompt = next(p for p in LOOKUP.prompts("train", 20, 0) if len(p.data["prices"]) == 1)
    row = demonstration(policy, LOOKUP, prompt, 0, 0)
    assert row.weights is not None and list(row.prompt) == policy.render(prompt.messages, tools=LOOKUP.tools)
    trained = policy.decode([t for t, w in zip(row.tokens, row.weights, strict=True) if w])
    read = policy.decode([t for t, w in zip(row.tokens, row.weights, strict=True) if not w])
    item, answer = prompt.data["item"], prompt.data["answer"]
    assert trained == f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>' + (
        f"The {item} costs {answer}."
    )
    assert read == f"\ntool\n{answer}\nassistant\n"
    assert row.tokens[-1] in policy.eos_ids and sum(t in policy.eos_ids for t in row.tokens) == 3


def test_an_oracle_that_fails_ends_the_run(engine: en.LocalEngine) -> None:
    class Broken:
        name, description, tools = "broken", "", LOOKUP.tools
        oracle = staticmethod(lambda prompt, history: {"role": "assistant", "content": "no"})
        prompts, reset, step, grade = LOOKUP.prompts, LOOKUP.reset, LOOKUP.step, LOOKUP.grade

    prompt = LOOKUP.prompts("train", 1, 0)[0]
    with pytest.raises(en.tasks.TaskError, match="fails on"):
        demonstration(engine.policy, Broken(), prompt, 0, 0)


def test_tools_and_graders_mark_the_turn() -> None:
    from earnest.tasks.playing import play

    prompt = LOOKUP.prompts("train", 1, 0)[0]

    def grade(*said: Message) -> Grade:
        return asyncio.run(
            play(LOOKUP, prompt, lambda p, h: said[sum(m["role"] == "assistant" for m in h)], max_turns=len(said))
        )[1]

    answer: Message = {"role": "assistant", "content": "It costs nothing."}
    right = _call(prompt.data["item"])
    assert (grade(right, answer).turn, grade(right, answer).feedback) == (1, "'It costs nothing.' is wrong.")
    assert (grade(right, _call("x"), answer).turn, grade(_call("x"), right, answer).turn) == (1, 0)
    assert "there is no item x" in grade(_call("x"), right, answer).feedback
    assert (grade(right).turn, grade(right).feedback) == (0, "You gave no answer.")
    solved = asyncio.run(play(LOOKUP, prompt, oracle))[1]
    assert (solved.correct, solved.turn, solved.feedback) == (True, None, "")
