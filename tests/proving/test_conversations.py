"""The laws of conversations hold on correct code, and each of the known mistakes breaks one of them.

The check of every step (``check_exact``) is turned off here: the laws have to find the mistakes on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import earnest as en
from earnest.models import SampleSpec
from earnest.proving import prove_conversations
from earnest.proving.conversations import _letters, _places
from earnest.rollouts import Segment, TurnSettings, collecting, conversing, rows
from earnest.rollouts.transcript import Transcript, authored
from earnest.rollouts.turn_sampling import TurnSampler
from earnest.tasks.tool_tasks import LOOKUP
from earnest_audit import Verdict
from tests.rollouts.perturbed import perturbed_nano
from tests.rollouts.test_trajectories import STRIPPING, everything, shifted
from tests.rollouts.worlds import Echo

SPEC = SampleSpec(max_new_tokens=16, seed=3)
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def engine() -> en.LocalEngine:
    return perturbed_nano()


@pytest.fixture
def template(engine: en.LocalEngine) -> Iterator[None]:
    """A chat template that removes a part of earlier turns."""
    before = engine.policy.tokenizer.chat_template
    engine.policy.tokenizer.chat_template = STRIPPING
    yield
    engine.policy.tokenizer.chat_template = before


def laws(engine: en.LocalEngine, world: Any = None, spec: SampleSpec = SPEC) -> Verdict:
    world = world or Echo()
    return prove_conversations(engine, world, world.prompts("train", 2, 0), 2, spec, TurnSettings(max_turns=3))


def broken(verdict: Verdict) -> set[str]:
    return {f.subject for f in verdict.failures}


@pytest.mark.parametrize("world", [Echo(), LOOKUP], ids=["replies", "tools"])
def test_the_laws_hold(engine: en.LocalEngine, world: Any) -> None:
    found = laws(engine, world, replace(SPEC, max_new_tokens=32))
    assert not broken(found), found
    assert {f.subject for f in found.findings if f.outcome == "holds"} == {
        "tokens trained", "stop tokens", "log-probs of the sampler", "log-probs of the weights", "policy version",
        "rendering", "label of an observation", "content of an observation", "turns before an observation",
        "turns in rows of their own", "one turn",
    }  # fmt: skip


def test_the_laws_hold_where_a_template_rewrites_history(engine: en.LocalEngine, template: None) -> None:
    assert not broken(laws(engine)), laws(engine)


def retokenised(patch: Patch) -> None:
    turn = Transcript.turn

    def again(self: Transcript, rollout: Any, message: Any) -> None:
        tokens = tuple(self.policy.tokenizer(self.policy.tokenizer.decode(rollout.tokens) + " ")["input_ids"])
        turn(self, replace(rollout, tokens=tokens, logprobs=(*rollout.logprobs, *[-1.0] * 9)[: len(tokens)]), message)

    patch.setattr(Transcript, "turn", again)


def masked(mistake: Callable[[rows.Row], rows.Row]) -> Callable[[Patch], None]:
    right = collecting.rollout_rows
    return lambda patch: patch.setattr(collecting, "rollout_rows", lambda *a: [mistake(row) for row in right(*a)])


def credited(patch: Patch) -> None:
    observe = Transcript.observe

    def wrong(self: Transcript, messages: Any) -> None:
        observe(self, messages)
        self.rows[-1] = [
            Segment(s.tokens, "policy", (-1.0,) * len(s.tokens), 0) if s.author == "tool" else s for s in self.rows[-1]
        ]

    patch.setattr(Transcript, "observe", wrong)


def other_version(patch: Patch) -> None:
    turn = Transcript.turn
    patch.setattr(Transcript, "turn", lambda self, r, m: turn(self, replace(r, policy_version=99), m))


def other_logprobs(patch: Patch) -> None:
    """The sampler itself has other weights: its record and the batch agree with each other."""
    give = TurnSampler._give
    wrong = lambda self, row, r: give(self, row, replace(r, logprobs=tuple(v - 0.1 for v in r.logprobs)))  # noqa: E731
    patch.setattr(TurnSampler, "_give", wrong)


def unstopped(patch: Patch) -> None:
    def mistake(row: rows.Row) -> rows.Row:
        weights = row.weights or (1.0,) * len(row.tokens)
        return replace(row, weights=(*weights[:-1], 0.5))

    masked(mistake)(patch)


def later_turns_halved(patch: Patch) -> None:
    """The tokens of later turns count half, except the one that ends a turn."""

    def mistake(row: rows.Row) -> rows.Row:
        weights = [*(row.weights or (1.0,) * len(row.tokens)), 0.0]
        observed = weights.index(0.0)
        halved = [w / 2 if i > observed and weights[i + 1] else w for i, w in enumerate(weights[:-1])]
        return replace(row, weights=tuple(halved))

    masked(mistake)(patch)


def other_record(patch: Patch) -> None:
    """The batch has other log-probs than the sampler returned."""
    turn = Transcript.turn
    worse = lambda self, r, m: turn(self, replace(r, logprobs=tuple(v - 0.1 for v in r.logprobs)), m)  # noqa: E731
    patch.setattr(Transcript, "turn", worse)


def tools_trained(patch: Patch) -> None:
    """What a tool said is trained, what a user said is not."""
    right = collecting.rollout_rows

    def as_sampled(s: Segment) -> Segment:
        return Segment(s.tokens, "policy", (-1.0,) * len(s.tokens), 0) if s.author == "tool" else s

    def wrong(rollout: Any, *rest: Any) -> Any:
        return right(replace(rollout, rows=tuple(tuple(map(as_sampled, row)) for row in rollout.rows)), *rest)

    patch.setattr(collecting, "rollout_rows", wrong)


def without_attention(patch: Patch) -> None:
    """The trainer's model reads each token alone."""

    def hidden(self: en.LocalEngine, part: Any) -> Any:
        inputs = part.batch.inputs
        states = self.policy.hidden(inputs.reshape(-1, 1)).reshape(*inputs.shape, -1)
        return states[part.batch.row, part.batch.position]

    patch.setattr(en.LocalEngine, "_hidden", hidden)


def without_causality(patch: Patch) -> None:
    """The trainer's model reads what comes later, too."""

    def hidden(self: en.LocalEngine, part: Any) -> Any:
        states = self.policy.hidden(part.batch.inputs)
        return (states + states.mean(1, keepdim=True))[part.batch.row, part.batch.position]

    patch.setattr(en.LocalEngine, "_hidden", hidden)


def other_draw(patch: Patch) -> None:
    """Conversations have other random numbers than rollouts."""
    row = conversing.SampleRow
    patch.setattr(conversing, "SampleRow", lambda i, j, tokens, draw, room: row(i, j, tokens, draw + 1, room))


@pytest.mark.parametrize(
    ("mistake", "law"),
    [
        (retokenised, "tokens trained"),
        (masked(shifted), "tokens trained"),
        (masked(everything), "tokens trained"),
        (credited, "tokens trained"),
        (other_version, "policy version"),
        (other_logprobs, "log-probs of the weights"),
        (unstopped, "stop tokens"),
        (other_record, "log-probs of the sampler"),
        (tools_trained, "label of an observation"),
        (without_attention, "content of an observation"),
        (without_causality, "turns before an observation"),
        (other_draw, "one turn"),
    ],
    ids=[
        "re-tokenised",
        "mask shifted",
        "observation trained",
        "tool credited",
        "version",
        "log-probs",
        "stop",
        "log-probs of another record",
        "tools trained",
        "observations not read",
        "later tokens read",
        "other random numbers",
    ],
)
def test_a_mistake_breaks_a_law(
    engine: en.LocalEngine, monkeypatch: Patch, mistake: Callable[[Patch], None], law: str
) -> None:
    monkeypatch.setattr(collecting, "check_exact", lambda *a: None)
    mistake(monkeypatch)
    assert law in broken(laws(engine))


def test_later_turns_of_another_weight_break_the_law_of_turns_in_rows_of_their_own(
    engine: en.LocalEngine, monkeypatch: Patch
) -> None:
    """No other law sees the mistake: the tokens, their log-probs and the weights of the stop tokens are right."""
    monkeypatch.setattr(collecting, "check_exact", lambda *a: None)
    later_turns_halved(monkeypatch)
    assert broken(laws(engine)) == {"turns in rows of their own"}


def test_a_history_that_the_template_would_rewrite_breaks_a_law(
    engine: en.LocalEngine, template: None, monkeypatch: Patch
) -> None:
    """The mistake: new messages are appended to the tokens so far, whatever the template does to earlier turns."""

    def appended(self: Transcript, messages: Any) -> None:
        self.messages += messages
        text = "\n" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        self.rows[-1] += authored(self.policy, text + "<|im_start|>assistant\n", messages)

    monkeypatch.setattr(Transcript, "observe", appended)
    assert broken(laws(engine)) == {"rendering"}


def test_an_observation_with_a_role_of_its_own_breaks_a_law(engine: en.LocalEngine, monkeypatch: Patch) -> None:
    right = collecting.rollout_rows

    def wrong(rollout: Any, *rest: Any) -> Any:
        """Observations of a tool are left out of the row, those of others are not."""
        kept = [tuple(s for s in row if s.author != "tool") for row in rollout.rows]
        return right(replace(rollout, rows=tuple(kept)), *rest)

    monkeypatch.setattr(collecting, "rollout_rows", wrong)
    assert "tokens trained" in broken(laws(engine))


@pytest.mark.parametrize("sampled", [(True, False), (False, True), (True, True)])
def test_a_turn_that_no_row_of_its_conversation_has_is_not_found(sampled: tuple[bool, bool]) -> None:
    """Two conversations with one row each. The other one's row has tokens that are trained, too."""
    batch = en.Batch.from_rows([(5, 6), (5, 7)], [(8, 9), (8, 9)])
    drawn = {
        (i, 0): [SimpleNamespace(prompt=(5, 6 + i), tokens=(8, 9 if is_there else 4))]
        for i, is_there in enumerate(sampled)
    }
    attempts = [SimpleNamespace(rollout=SimpleNamespace(rows=[()], prompt_index=i, sample_index=0)) for i in range(2)]
    made: Any = SimpleNamespace(attempts=attempts, drawn=drawn)
    found = [turn and (turn.row, turn.first) for turn in _places(batch, made)]
    assert found == [(i, 1) if is_there else None for i, is_there in enumerate(sampled)]


def test_letters_are_compared_without_spaces_and_torn_characters() -> None:
    assert _letters(" a\ufffd b\n") == "ab"
