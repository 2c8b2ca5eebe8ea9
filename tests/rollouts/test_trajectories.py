"""Laws of conversations: what is trained is what was sampled, whatever the timing of the environment."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import earnest as en
from earnest.errors import ConfigError, SamplingError, SignalError
from earnest.models import SampleSpec
from earnest.rollouts import Rollouts, Segment, Trajectory, TurnSettings, collecting, rewrites_history, rows
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.rows import rollout_rows, stack
from earnest.rollouts.transcript import Transcript
from earnest.signals import Batch
from earnest.signals.scorer import LogProbsWanted
from earnest.tasks import GraderErrors, StepResult, TaskError
from tests.rollouts.perturbed import perturbed_nano
from tests.rollouts.worlds import Echo, OneTurn

SPEC = SampleSpec(max_new_tokens=24, seed=3)
DAPO = en.DAPO()
STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('e')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> en.LocalEngine:
    return perturbed_nano()


def talk(
    engine: en.LocalEngine, world: Any = None, turns: TurnSettings | None = None, spec: SampleSpec = SPEC, **more: Any
) -> Rollouts:
    world = world or Echo()
    return en.collect(engine, world, world.prompts("train", 3, 0), 4, spec, turns=turns, objective=DAPO, **more)


def trajectories(found: Rollouts) -> list[Trajectory]:
    return [a.rollout for a in found.attempts if isinstance(a.rollout, Trajectory)]


def same(a: Batch, b: Batch, *names: str) -> None:
    for name in names or (
        "inputs",
        "targets",
        "weight",
        "length",
        "group",
        "policy_version",
        "advantages",
        "behaviour",
    ):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


# --- the laws ---------------------------------------------------------------------------------------------------------


def test_a_conversation_of_one_turn_is_a_rollout_bit_for_bit(engine: en.LocalEngine) -> None:
    task = en.get_task("sort")
    prompts = task.prompts("train", 4, 0)
    plain = en.collect(engine, task, prompts, 4, SPEC, objective=DAPO)
    turned = en.collect(engine, OneTurn(task), prompts, 4, SPEC, objective=DAPO, turns=TurnSettings(max_turns=1))
    same(plain.batch, turned.batch)
    assert plain.batch.max_length == turned.batch.max_length
    assert plain.texts == turned.texts
    assert plain.grades == turned.grades
    ours, theirs = engine.gradients(turned.batch, DAPO), engine.gradients(plain.batch, DAPO)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_tokens_trained_are_tokens_sampled_and_every_stop_token_is_trained(
    engine: en.LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    choose = engine.slots

    def recorded(*args: Any) -> Any:
        context = choose(*args)
        slots = context.__enter__()
        step = slots.step

        def stepped() -> Any:
            found = step()
            drawn.extend(found)
            return found

        slots.step = stepped  # type: ignore[method-assign]

        class Same:
            def __enter__(self) -> Any:
                return slots

            def __exit__(self, *error: Any) -> Any:
                return context.__exit__(*error)

        return Same()

    monkeypatch.setattr(engine, "slots", recorded)
    found = talk(engine)
    batch = found.batch
    sampled = sorted(token for _, c in drawn for token in c.tokens)
    assert sorted(batch.token_target.tolist()) == sampled
    stops = engine.policy.eos_ids
    assert sum(t in stops for t in batch.token_target.tolist()) == sum(c.finish == "stop" for _, c in drawn) > 20
    for t, row in zip(trajectories(found), range(len(batch)), strict=True):
        whole = [*batch.inputs[row, : batch.lengths[row]].tolist(), int(batch.targets[row, batch.lengths[row] - 1])]
        assert whole == [token for s in t.rows[0] for token in s.tokens]
        weights = [0.0, *batch.weight[row, : batch.lengths[row]].tolist()]
        assert weights == [float(s.author == "policy") for s in t.rows[0] for _ in s.tokens]
        # Every prompt of a turn is what the policy read: the tokens before it.
        text = engine.policy.tokenizer.decode(whole)
        assert text.rstrip("\n") == engine.policy.render_text(t.messages, add_generation_prompt=False).rstrip("\n")


def test_log_probs_are_those_of_the_engine(engine: en.LocalEngine) -> None:
    batch = talk(engine).batch
    scored = engine.score(batch, LogProbsWanted(1.0))
    assert isinstance(scored, torch.Tensor)
    assert torch.allclose(scored, batch.behaviour, atol=1e-4)


def test_the_label_of_an_observation_changes_nothing_and_its_content_does(engine: en.LocalEngine) -> None:
    found = talk(engine)
    (first, *_), batch = trajectories(found), found.batch

    def again(change: Callable[[Segment], Segment]) -> Batch:
        made = [replace(t, rows=tuple(tuple(map(change, row)) for row in t.rows)) for t in trajectories(found)]
        rows_ = [row for t in made for row in rollout_rows(t)]
        return stack(rows_, temperature=1.0).with_signals(advantages=batch.advantages)

    labelled = again(lambda s: replace(s, author="user") if s.author == "tool" else s)
    same(labelled, batch, "inputs", "targets", "weight", "behaviour")
    assert {s.author for s in first.rows[0]} == {"policy", "tool", "user", "template"}
    other = again(lambda s: replace(s, tokens=s.tokens[::-1]) if s.author == "tool" else s)
    same(other, batch, "weight", "behaviour")
    assert torch.equal(other.token_target, batch.token_target)
    ours, theirs = engine.gradients(other, DAPO), engine.gradients(batch, DAPO)
    assert any(not torch.allclose(ours[name], theirs[name], rtol=1e-3) for name in theirs)


def test_turns_in_rows_of_their_own_have_the_same_gradient(engine: en.LocalEngine) -> None:
    """Unrolled by hand: each turn is a completion, and all tokens before it are its prompt."""
    found = talk(engine)
    prompts, completions, behaviour, advantages = [], [], [], []
    values = iter(found.batch.advantages.tolist())  # type: ignore[union-attr]
    for t in trajectories(found):
        before: list[int] = []
        for segment in t.rows[0]:
            if segment.author == "policy":
                prompts.append(list(before))
                completions.append(segment.tokens)
                behaviour.append(segment.logprobs)
                advantages.append([next(values) for _ in segment.tokens])
            before += segment.tokens
    unrolled = Batch.from_rows(prompts, completions, behaviour=behaviour, advantages=advantages)  # type: ignore[arg-type]
    assert len(unrolled) == 3 * len(found.batch)
    ours, theirs = engine.gradients(found.batch, DAPO), engine.gradients(unrolled, DAPO)
    assert max(float(g.abs().max()) for g in theirs.values()) > 1e-5
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-3, atol=1e-7), name


@pytest.mark.parametrize("at_once", [256, 3])
def test_the_timing_of_tools_changes_nothing(engine: en.LocalEngine, at_once: int) -> None:
    waits = itertools.cycle([0.0, 0.004, 0.001, 0.02, 0.0, 0.01, 0.002])
    at_rest, late = talk(engine), talk(engine, Echo(wait=lambda: next(waits)), turns=TurnSettings(at_once=at_once))
    for a, b in zip(trajectories(at_rest), trajectories(late), strict=True):
        assert [s.tokens for s in a.rows[0]] == [s.tokens for s in b.rows[0]]
        assert a.messages == b.messages
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert at_rest.grades == late.grades


@pytest.mark.parametrize("at_once", [256, 2])
def test_the_others_go_on_to_their_end_while_one_waits_for_its_tool(engine: en.LocalEngine, at_once: int) -> None:
    """The first tool that is called answers only after all other conversations have ended. Turn by turn in lockstep,
    none of them could go on."""

    @dataclass
    class OneWaits(Echo):
        others: int = 11
        late: bool = False

        async def step(self, state: dict[str, Any], message: Any) -> StepResult:
            if not self.late:
                self.late, self.go_on = True, asyncio.Event()
                state["late"] = True
                await asyncio.wait_for(self.go_on.wait(), 30)
            return await super().step(state, message)

        async def grade(self, state: dict[str, Any], ending: Any) -> Any:
            self.others -= "late" not in state
            if not self.others:
                self.go_on.set()
            return await super().grade(state, ending)

    found = talk(engine, OneWaits(), turns=TurnSettings(at_once=at_once))
    assert found.metrics["ended/tool_failure"] == 0
    assert found.texts == talk(engine).texts


def test_another_seed_gives_other_conversations_and_a_group_has_one_seed(engine: en.LocalEngine) -> None:
    world = Echo()
    prompts = world.prompts("train", 3, 0)
    a = en.collect(engine, world, prompts, 4, SPEC)
    assert len(set(world.seeds)) == 3
    b = en.collect(engine, world, prompts, 4, replace(SPEC, seed=4))
    assert a.texts != b.texts
    assert len(set(a.texts[:4])) > 1


# --- ends, rewards, credit --------------------------------------------------------------------------------------------


def test_every_ending_is_reported(engine: en.LocalEngine) -> None:
    found = talk(engine)
    assert found.metrics["ended/answered"] + found.metrics["ended/token_limit"] == 1
    assert found.metrics["turns"] == 3 or found.metrics["ended/token_limit"] > 0
    bounded = talk(engine, turns=TurnSettings(max_turns=2))
    assert bounded.metrics["ended/turn_limit"] + bounded.metrics["ended/token_limit"] == 1
    assert max(len(t.turn_rewards) for t in trajectories(bounded)) == 2
    short = talk(engine, turns=TurnSettings(max_tokens=40))
    assert short.metrics["ended/token_limit"] == 1
    for t in trajectories(short):
        assert len([token for s in t.rows[0] for token in s.tokens]) <= 60  # the last reply may be longer
        assert sum(len(s.tokens) for s in t.rows[0][:-1]) <= 60
    broken = talk(engine, Echo(fails=lambda state: len(state["said"]) == 1), max_grader_errors=1.0)
    assert broken.metrics["ended/tool_failure"] > 0
    assert broken.metrics["grader_errors"] == broken.metrics["ended/tool_failure"] * 12
    with pytest.raises(GraderErrors, match=r"environment echo raised in \d+ of 12 conversations.*the tool is broken"):
        talk(engine, Echo(fails=lambda state: True))


def test_a_prompt_that_leaves_no_room_is_refused(engine: en.LocalEngine) -> None:
    with pytest.raises(SamplingError, match=r"leaves none for an answer; raise turns\.max_tokens"):
        talk(engine, turns=TurnSettings(max_tokens=3))


def test_rewards_of_turns_and_grade_add_up(engine: en.LocalEngine) -> None:
    for a in talk(engine).attempts:
        assert isinstance(a.rollout, Trajectory)
        assert a.grade.reward == pytest.approx(sum(a.rollout.turn_rewards) + a.grade.extras["letters"] / 100)
        assert len(a.rollout.turn_rewards) == len(list(a.rollout.turns()))


def test_returns_by_hand() -> None:
    t = Trajectory(0, 0, (), (), (), (1.0, 2.0, 4.0), "answered", 1.0)
    assert t.returns(0.5, 8.0) == (1 + 0.5 * 2 + 0.25 * 12, 2 + 0.5 * 12, 12.0)
    assert t.returns(1.0, 0.0) == (7.0, 6.0, 4.0)


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_credit_by_hand(engine: en.LocalEngine, credit: Any, discount: float) -> None:
    found = talk(engine, turns=TurnSettings(credit=credit, discount=discount), estimator="none")
    groups: dict[tuple[int, int], list[float]] = {}
    each = []
    for a in found.attempts:
        t = a.rollout
        assert isinstance(t, Trajectory)
        values = t.returns(discount, a.grade.reward - sum(t.turn_rewards))
        each.append(values)
        for k, value in enumerate(values if credit == "turn" else values[:1]):
            groups.setdefault((t.prompt_index, k), []).append(value)
    want = []
    for a, values in zip(found.attempts, each, strict=True):
        t = a.rollout
        assert isinstance(t, Trajectory)
        for k, turn in enumerate(t.turns()):
            others = groups[t.prompt_index, k if credit == "turn" else 0]
            own = values[k if credit == "turn" else 0]
            want += [own - sum(others) / len(others) if len(others) > 1 else 0.0] * len(turn.tokens)
    assert found.batch.advantages is not None
    assert found.batch.advantages.tolist() == pytest.approx(want, abs=1e-6)
    assert len({round(v, 6) for v in want}) > 3
    alone = sum(len(v) == 1 for v in groups.values())
    assert found.metrics["turns_not_compared"] == (alone if credit == "turn" else 0)


def test_the_self_teacher_and_preferences_read_conversations(engine: en.LocalEngine) -> None:
    world = Echo()
    objective = en.DAPO() + en.SDPO() + en.DPO()
    found = en.collect(engine, world, world.prompts("train", 3, 0), 4, SPEC, objective=objective)
    report = engine.step(found.batch, objective)
    assert not report.idle
    with pytest.raises(ConfigError, match="echo has conversations and no right answers to demonstrate"):
        en.collect(engine, world, world.prompts("train", 3, 0), 4, SPEC, objective=en.SFT())


def test_an_environment_that_cannot_start_ends_the_run(engine: en.LocalEngine) -> None:
    def broken() -> float:
        raise OSError("no display")

    with pytest.raises(TaskError, match="echo could not start a conversation about prompt echo:0: OSError: no display"):
        talk(engine, Echo(wait=broken))


def test_a_step_without_a_message_is_a_mistake_of_the_environment(engine: en.LocalEngine) -> None:
    class Mute(Echo):
        async def step(self, state: dict[str, Any], message: Any) -> StepResult:
            return StepResult((), done=False)

    with pytest.raises(GraderErrors, match="step returned no message, and the conversation is not done"):
        talk(engine, Mute())


def test_a_turn_that_ended_without_an_end_token_keeps_its_last_token(engine: en.LocalEngine) -> None:
    policy = engine.policy
    transcript = Transcript(policy, [{"role": "user", "content": "tea"}])
    tokens = tuple(policy.tokenizer("3 1 2", add_special_tokens=False)["input_ids"])
    said = Rollout(0, 0, transcript.prompt, tokens, (-1.0,) * len(tokens), "length", 0, 1.0)
    transcript.turn(said, {"role": "assistant", "content": "another parse"})
    transcript.observe([{"role": "user", "content": "go on"}])
    assert [m["content"] for m in transcript.messages] == ["tea", "3 1 2", "go on"] and len(transcript.rows) == 1


# --- templates that rewrite history -----------------------------------------------------------------------------------


@pytest.fixture
def stripping(engine: en.LocalEngine, monkeypatch: pytest.MonkeyPatch) -> en.LocalEngine:
    monkeypatch.setattr(engine.policy.tokenizer, "chat_template", STRIPPING)
    return engine


def test_a_template_that_rewrites_history_is_detected(engine: en.LocalEngine) -> None:
    assert rewrites_history(engine.policy) is None
    tokenizer = engine.policy.tokenizer
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = STRIPPING
        assert "rewrites earlier turns when a user message follows" in str(rewrites_history(engine.policy))
        assert "when a user message follows" in str(rewrites_history(engine.policy, with_tools=False))
        tokenizer.chat_template = before.replace("{{ text(message.content) }}", "{{ 'x' if loop.last else 'y' }}")
        assert "rewrites earlier turns when a tool message follows" in str(rewrites_history(engine.policy))
    finally:
        tokenizer.chat_template = before


def test_a_template_that_rewrites_history_gives_rows_that_are_each_exact(stripping: en.LocalEngine) -> None:
    found = talk(stripping)
    several = [t for t in trajectories(found) if len(t.rows) > 1]
    assert several and found.metrics["rows_per_conversation"] > 1
    for t in several:
        for row, history in zip(t.rows, t.histories, strict=True):
            first = next(i for i, s in enumerate(row) if s.author == "policy")
            read = [token for s in row[:first] for token in s.tokens]
            assert read == stripping.policy.render(history)
    assert len(found.batch) == sum(len(t.rows) for t in trajectories(found))
    scored = stripping.score(found.batch, LogProbsWanted(1.0))
    assert isinstance(scored, torch.Tensor)
    assert torch.allclose(scored, found.batch.behaviour, atol=1e-4)
    # No room is left after the reply to the first turn: the row that it would begin is not there.
    for t in trajectories(talk(stripping, turns=TurnSettings(max_tokens=40))):
        assert len(t.rows) == len(t.histories) <= len(t.turn_rewards)
    (first, *_) = (i for i, t in enumerate(trajectories(found)) if len(t.rows) > 1)
    place = sum(len(t.rows) for t in trajectories(found)[:first])
    one = found.batch.rows([place]).advantages
    two = found.batch.rows([place + 1]).advantages
    assert one is not None and two is not None
    assert one[0] == two[0]  # one conversation, one advantage


# --- planted mistakes -------------------------------------------------------------------------------------------------


def test_a_turn_that_is_tokenized_again_is_caught(engine: en.LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Transcript.turn

    def again(self: Transcript, rollout: Any, message: Any) -> None:
        text = self.policy.tokenizer.decode(rollout.tokens)
        tokens = tuple(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])
        turn(self, replace(rollout, tokens=tokens, logprobs=(*rollout.logprobs, *[-1.0] * 9)[: len(tokens)]), message)

    monkeypatch.setattr(Transcript, "turn", again)
    with pytest.raises(SignalError, match="trains other tokens than the policy sampled"):
        talk(engine, spec=replace(SPEC, temperature=2.0))


def shifted(row: rows.Row) -> rows.Row:
    weights = row.weights or (1.0,) * len(row.tokens)
    return replace(row, weights=(*weights[1:], weights[0]))


def everything(row: rows.Row) -> rows.Row:
    return replace(row, weights=None, logprobs=(*(row.logprobs or ()), *[-1.0] * 99)[: len(row.tokens)])


@pytest.mark.parametrize("mistake", [shifted, everything], ids=["mask shifted by one", "observation trained"])
def test_a_wrong_mask_is_caught(
    engine: en.LocalEngine, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[rows.Row], rows.Row]
) -> None:
    right = collecting.rollout_rows
    monkeypatch.setattr(collecting, "rollout_rows", lambda *a: [mistake(row) for row in right(*a)])
    with pytest.raises(SignalError, match="trains other tokens than the policy sampled"):
        talk(engine)


def test_a_tools_output_credited_to_the_policy_is_caught(
    engine: en.LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SignalError, match="a segment of the policy has no log-probs"):
        Segment((1, 2), "policy")
    with pytest.raises(SignalError, match="a segment of the tool has its own log-probs"):
        Segment((1, 2), "tool", (-1.0, -1.0), 0)
    observe = Transcript.observe

    def credited(self: Transcript, messages: Any) -> None:
        observe(self, messages)
        self.rows[-1] = [
            Segment(s.tokens, "policy", (-1.0,) * len(s.tokens), 0) if s.author == "tool" else s for s in self.rows[-1]
        ]

    monkeypatch.setattr(Transcript, "observe", credited)
    with pytest.raises(SignalError, match="trains other tokens than the policy sampled"):
        talk(engine)


def test_log_probs_of_the_wrong_version_are_caught(engine: en.LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Transcript.turn
    with monkeypatch.context() as patch:
        patch.setattr(Transcript, "turn", lambda self, r, m: turn(self, replace(r, policy_version=99), m))
        with pytest.raises(SignalError, match="names the policy version 99, which did not sample it"):
            talk(engine)
    with monkeypatch.context() as patch:
        worse = lambda self, r, m: turn(self, replace(r, logprobs=tuple(v - 0.1 for v in r.logprobs)), m)  # noqa: E731
        patch.setattr(Transcript, "turn", worse)
        with pytest.raises(SignalError, match="other log-probs than those that the tokens were sampled with"):
            talk(engine)


def test_a_sampler_elsewhere_is_called_with_whole_batches(engine: en.LocalEngine) -> None:
    """Engines without slots sample all rows that wait; the same seed gives the same conversations."""
    calls = []

    def remote(prompts: Any, n: int, spec: SampleSpec) -> Any:
        calls.append(len(prompts))
        return engine.sample(prompts, n, spec)

    a, b = talk(engine, sample=remote), talk(engine, sample=remote)
    assert a.texts == b.texts
    assert max(calls) > 1
    assert len(set(a.texts[:4])) > 1
    scored = engine.score(a.batch, LogProbsWanted(1.0))
    assert isinstance(scored, torch.Tensor)
    assert torch.allclose(scored, a.batch.behaviour, atol=1e-4)


def test_conversations_run_inside_a_running_event_loop(engine: en.LocalEngine) -> None:
    async def inside() -> Rollouts:
        return talk(engine)

    assert asyncio.run(inside()).texts == talk(engine).texts
