"""LocalEngine: the gradient is the whole batch's whatever the cut, and an update goes in the order that it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from earnest.engines import AdamW, AtIdsWanted, HiddenWanted, LocalEngine, LogitsWanted, LogProbsWanted, TopKWanted
from earnest.engines.optimizer_state import flatten_optimizer
from earnest.errors import CheckpointError, ConfigError, ObjectiveError, SignalError
from earnest.models.sampling import SampleSpec
from earnest.objectives import BNPO, GRPO, SFT
from earnest.objectives.base import Objective, Term, Value
from earnest.objectives.needs import Entropy, LogProb, Need
from earnest.objectives.view import View
from earnest.signals import Batch, FullLogits, Hidden, TopK

Make = Callable[..., LocalEngine]


@dataclass(frozen=True, kw_only=True)
class RootMeanSquare(Term):
    """Not a sum over rows, and reads two scalars: what micro-batching gets wrong first."""

    kind: ClassVar[str] = "test_rms"
    paper: ClassVar[str] = "none"

    @property
    def additive(self) -> bool:
        return False

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (LogProb(), Entropy())

    def evaluate(self, view: View) -> Value:
        return Value((view.scalar(LogProb()).square() + view.scalar(Entropy())).mean().sqrt(), "rms", {})


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = float(a[name].abs().max())
        assert scale > 1e-8, f"{name}: a gradient of 0 proves nothing"
        # The adapter's parameters are fp32, so that is the resolution of a gradient.
        assert float((a[name] - b[name]).abs().max()) <= max(tolerance, 3e-6) * scale, name


def in_plain_torch(engine: LocalEngine, batch: Batch) -> dict[str, Tensor]:
    """GRPO (clip 0.2, mean over sequences of token means) in a few lines of autograd over full logits."""
    logits = engine.policy.model(batch.inputs).logits
    lp = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    loss = torch.zeros((), dtype=lp.dtype)
    assert batch.behaviour is not None and batch.advantages is not None
    for r in range(len(batch)):
        mine = batch.row == r
        ratio = (lp[batch.row[mine], batch.position[mine]] - batch.behaviour[mine]).exp()
        a = batch.advantages[mine]
        loss = loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean() / len(batch)
    grads = torch.autograd.grad(loss, engine.parameters)
    return dict(zip(engine.names, grads, strict=True))


def test_the_gradient_is_that_of_plain_autograd(make_engine: Make, batch: Batch) -> None:
    engine = make_engine()
    close(engine.gradients(batch, GRPO(clip=0.2)), in_plain_torch(engine, batch))


@pytest.mark.parametrize("micro_tokens", [1, 11, 24, 40])
@pytest.mark.parametrize(
    "objective", [GRPO(clip=0.2), GRPO(clip=0.2) + 0.3 * RootMeanSquare()], ids=["additive", "not additive"]
)
def test_uneven_micro_batches_give_the_whole_gradient(
    make_engine: Make, batch: Batch, micro_tokens: int, objective: Term | Objective
) -> None:
    whole, cut = make_engine(), make_engine(micro_tokens=micro_tokens)
    close(whole.gradients(batch, objective), cut.gradients(batch, objective))
    a, b = whole.step(batch, objective), cut.step(batch, objective)
    assert a.micro_batches == 1 and b.micro_batches > 1
    assert b.passes == ("one pass" if Objective.of(objective).additive else "two passes")
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    for label in a.terms:
        assert a.terms[label].metrics == pytest.approx(b.terms[label].metrics, rel=1e-5, nan_ok=True)


def test_the_seam_by_hand_equals_step(make_engine: Make, batch: Batch) -> None:
    """scalars → objective → backward → update, as the Tinker wire calls them, in one cut; step in another."""
    by_hand, by_step = make_engine(micro_tokens=13), make_engine()
    objective = GRPO(clip=0.2) + 0.3 * RootMeanSquare()
    fields = by_hand.scalars(batch, objective.needs(batch, {}))
    leaves = {n: type(f)(f.values.clone().requires_grad_(), f.at, f.ran, f.metrics) for n, f in fields.items()}
    loss = objective.evaluate(batch, leaves, {}).loss
    grads = torch.autograd.grad(loss, [f.values for f in leaves.values()])
    by_hand.backward(batch, dict(zip(leaves, grads, strict=True)))
    by_hand.update()
    by_step.step(batch, objective)
    for p, q in zip(by_hand.parameters, by_step.parameters, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_tokens_are_those_that_were_trained_on_without_padding(make_engine: Make, batch: Batch) -> None:
    """They are a replica's weight in the average."""
    engine = make_engine(micro_tokens=16)
    for steps in (1, 2):
        engine.step(batch, GRPO())
        assert engine.tokens == steps * batch.active.shape[0] < batch.inputs.numel() * steps


def test_two_backward_calls_add_up(make_engine: Make, batch: Batch) -> None:
    """A batch sent as two requests trains on both, not on the last one."""
    engine = make_engine()
    weights = {LogProb(): torch.linspace(-1, 1, batch.active.shape[0], dtype=torch.float64)}
    engine.backward(batch, weights)
    once = [p.grad.clone() for p in engine.parameters if p.grad is not None]
    engine.backward(batch, weights)
    for p, first in zip(engine.parameters, once, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, 2 * first)


def test_update_goes_clip_optimizer_guard_outer(make_engine: Make, batch: Batch) -> None:
    events: list[str] = []

    class Recorder:
        def bind(self, adapter: object, optimizer: object) -> None:
            events.append("bound")

        def prepare(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
            events.append(f"guard sees a gradient: {all(p.grad is not None for p in parameters)}")

        def ablated(self) -> AbstractContextManager[None]:
            return nullcontext()

        def judge(
            self, names: Sequence[str], before: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]
        ) -> dict[str, float]:
            moved = sum(float((p - b).abs().sum()) for p, b in zip(parameters, before, strict=True))
            events.append(f"guard sees a step: {moved > 0}")
            for p, b in zip(parameters, before, strict=True):
                p.copy_(b)  # this guard refuses the whole step
            return {"refused": 1.0}

        def after_update(self, engine: LocalEngine) -> dict[str, float]:
            events.append(f"outer at version {engine.version}")
            return {"round": 7.0}

        def state_dict(self) -> dict[str, Tensor]:
            return {}

        def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
            del state

    recorder = Recorder()
    engine = make_engine(guard=recorder, outer=recorder, max_grad_norm=1e-3)
    before = [p.detach().clone() for p in engine.parameters]
    engine.optimizer.register_step_pre_hook(
        lambda *_: events.append(
            f"optimizer sees norm ≤ 1e-3: {sum(float(p.grad.norm()) ** 2 for p in engine.parameters) ** 0.5 < 1.001e-3}"
        )
    )
    report = engine.step(batch, GRPO(clip=0.2))
    assert events == [
        "bound",
        "guard sees a gradient: True",
        "optimizer sees norm ≤ 1e-3: True",
        "guard sees a step: True",
        "outer at version 1",
    ]
    assert report.update.gradient_norm > 1e-3, "the norm before clipping is what is logged"
    assert report.update.clip_factor == pytest.approx(1e-3 / report.update.gradient_norm)
    assert report.update.guard == {"refused": 1.0} and report.update.outer == {"round": 7.0}
    assert report.update.update_norm == 0.0 and all(
        bool((p == b).all()) for p, b in zip(engine.parameters, before, strict=True)
    )


def test_update_without_backward_and_a_wild_gradient_change_nothing(make_engine: Make, batch: Batch) -> None:
    engine = make_engine()
    before = [p.detach().clone() for p in engine.parameters]
    with pytest.raises(ObjectiveError, match="before any backward"):
        engine.update()
    engine.backward(batch, {LogProb(): torch.full((batch.active.shape[0],), float("inf"), dtype=torch.float64)})
    with pytest.raises(ObjectiveError, match="gradient norm is"):
        engine.update()
    assert engine.version == 0 and all(p.grad is None for p in engine.parameters)
    assert all(bool((p == b).all()) for p, b in zip(engine.parameters, before, strict=True))


def test_bnpo_beside_a_term_of_the_whole_batch_is_refused_where_the_batch_is_cut(
    make_engine: Make, batch: Batch
) -> None:
    """BNPO divides by the tokens of each micro-batch; evaluated on the whole batch it would silently be DAPO."""
    engine = make_engine(micro_tokens=16)
    engine.gradients(batch, BNPO())
    with pytest.raises(ObjectiveError, match=r"bnpo: divides by the tokens of each micro-batch, but test_rms needs"):
        engine.step(batch, BNPO() + RootMeanSquare())
    make_engine().step(batch, BNPO() + RootMeanSquare())


def test_gradients_and_shares_leave_no_trace(make_engine: Make, batch: Batch) -> None:
    engine = make_engine()
    objective = GRPO(clip=0.2) + 0.3 * RootMeanSquare()
    engine.backward(batch, {LogProb(): torch.ones(batch.active.shape[0], dtype=torch.float64)})
    held = [p.grad.clone() for p in engine.parameters if p.grad is not None]
    shares = engine.gradient_shares(batch, objective)
    assert sum(share for _, share in shares.values()) == pytest.approx(1.0)
    assert all(norm > 0 for norm, _ in shares.values())
    for p, grad in zip(engine.parameters, held, strict=True):
        assert p.grad is not None and bool((p.grad == grad).all())


def test_a_term_of_weight_0_is_not_computed_and_is_named(make_engine: Make, batch: Batch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Explodes(RootMeanSquare):
        kind: ClassVar[str] = "explodes"

        def evaluate(self, view: View) -> Value:
            raise AssertionError("computed although its weight is 0")

    report = make_engine().step(batch, GRPO(clip=0.2) + 0.0 * Explodes())
    assert report.skipped == ("explodes",) and set(report.terms) == {"grpo"}
    with pytest.raises(ObjectiveError, match="nothing would be trained"):
        make_engine().step(batch, 0.0 * GRPO(clip=0.2))


def test_a_step_asks_once_which_terms_are_idle(
    make_engine: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop, the objective's check and the report each asked again, with a wait for the device every time."""
    asked: list[str] = []
    plain = Term.check

    def check(term: Term, rows: Batch) -> str | None:
        asked.append(term.kind)
        return plain(term, rows)

    monkeypatch.setattr(Term, "check", check)
    monkeypatch.setattr(Objective, "idle", lambda *_: pytest.fail("the check has the answer"))
    sought = batch.with_signals(sought=("rollout", "demonstration"))
    report = make_engine(micro_tokens=20).step(sought, GRPO() + SFT())
    assert asked == ["grpo", "sft"] and list(report.idle) == ["sft"]


def test_what_is_missing_is_named_before_anything_runs(make_engine: Make, batch: Batch) -> None:
    engine = make_engine()
    with pytest.raises(SignalError, match="grpo: needs the signal 'behaviour'"):
        engine.step(batch.with_signals(behaviour=None), GRPO(clip=0.2))
    with pytest.raises(SignalError, match="sft: needs rows with role demonstration"):
        engine.step(batch, GRPO(clip=0.2) + SFT())
    assert engine.version == 0


def test_the_reference_is_the_gate_at_0(make_engine: Make, batch: Batch) -> None:
    """Moving the adapter moves the live policy and not the reference; at initialization the two are the same bits."""
    fresh, perturbed = make_engine(perturbed=False), make_engine()
    base = perturbed.score(batch, LogProbsWanted(), policy="base")
    assert torch.equal(base, fresh.score(batch, LogProbsWanted()))  # type: ignore[arg-type]
    live = perturbed.score(batch, LogProbsWanted())
    assert isinstance(live, Tensor) and isinstance(base, Tensor) and float((live - base).abs().max()) > 1e-3
    perturbed.step(batch, GRPO(clip=0.2))
    assert torch.equal(base, perturbed.score(batch, LogProbsWanted(), policy="base"))  # type: ignore[arg-type]


def test_every_way_of_scoring_agrees_with_the_logits(make_engine: Make, batch: Batch) -> None:
    engine = make_engine(micro_tokens=17)
    full = engine.score(batch, LogitsWanted())
    assert isinstance(full, FullLogits)
    truth = engine.policy.model(batch.inputs).logits[batch.row, batch.position].log_softmax(-1)
    torch.testing.assert_close(full.logits.log_softmax(-1), truth)
    torch.testing.assert_close(
        engine.score(batch, LogProbsWanted()), truth.gather(-1, batch.token_target[:, None])[:, 0]
    )
    top = engine.score(batch, TopKWanted(5))
    assert isinstance(top, TopK)
    torch.testing.assert_close(top.logprobs, truth.topk(5, -1).values)
    torch.testing.assert_close(top.logprobs.exp().sum(-1) + top.tail.exp(), torch.ones(len(top), dtype=torch.float64))
    torch.testing.assert_close(engine.score(batch, AtIdsWanted(top.ids)), top.logprobs)
    hidden = engine.score(batch, HiddenWanted())
    assert isinstance(hidden, Hidden)
    torch.testing.assert_close(engine.policy.head.logits(hidden.states).log_softmax(-1), truth)
    with pytest.raises(SignalError, match="top-K needs"):
        engine.score(batch, TopKWanted(132))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollouts_carry_exact_log_probs_and_the_version(make_engine: Make, batch: Batch, temperature: float) -> None:
    engine = make_engine(dtype=torch.float32)
    engine.step(batch, GRPO(clip=0.2))
    rollouts = engine.sample([[3, 4, 5], [6, 7]], 3, SampleSpec(max_new_tokens=6, temperature=temperature, seed=5))
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(p, s) for p in range(2) for s in range(3)]
    assert {r.policy_version for r in rollouts} == {1} and {r.temperature for r in rollouts} == {temperature}
    again = Batch.from_rows([r.prompt for r in rollouts], [r.tokens for r in rollouts], temperature=temperature)
    scored = engine.score(again, LogProbsWanted(temperature=temperature))
    torch.testing.assert_close(scored, torch.tensor([v for r in rollouts for v in r.logprobs]), rtol=1e-4, atol=1e-4)


def test_save_and_load_continue_bit_for_bit(make_engine: Make, batch: Batch, tmp_path: Path) -> None:
    straight, first, second = make_engine(), make_engine(), make_engine(perturbed=False)
    for _ in range(4):
        straight.step(batch, GRPO(clip=0.2))
    for _ in range(2):
        first.step(batch, GRPO(clip=0.2))
    first.save(tmp_path / "at-2")
    second.load(tmp_path / "at-2")
    assert second.version == 2
    for _ in range(2):
        second.step(batch, GRPO(clip=0.2))
    for p, q in zip(straight.parameters, second.parameters, strict=True):
        assert torch.equal(p, q)
    # A load that forgot the optimizer would differ here: the moments are part of the next step.
    (tensors, meta), (again, meta_again) = flatten_optimizer(straight.optimizer), flatten_optimizer(second.optimizer)
    assert meta == meta_again and all(torch.equal(tensors[k], again[k]) for k in tensors)


def test_a_torn_or_foreign_checkpoint_is_refused(make_engine: Make, batch: Batch, tmp_path: Path) -> None:
    engine = make_engine()
    engine.step(batch, GRPO(clip=0.2))
    folder = engine.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="was made with AdamW"):
        make_engine(lr=5e-4).load(folder)
    other = make_engine()
    with torch.no_grad():
        other.policy.model.model.norm.weight.add_(1)
    other.policy.fingerprint(fresh=True)
    with pytest.raises(CheckpointError, match="another base model"):
        other.load(folder)
    tensors = folder / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="not the file that was written"):
        engine.load(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        engine.load(folder)


def test_bad_settings_say_the_way_out(make_engine: Make) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm is 0"):
        make_engine(max_grad_norm=0)
    with pytest.raises(ConfigError, match="micro_tokens is 0"):
        make_engine(micro_tokens=0)
    with pytest.raises(ConfigError, match=r"AdamW\.lr: must be a finite number at least 0, got -1"):
        make_engine(lr=-1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_a_step_in_every_dtype_follows_float64(make_engine: Make, batch: Batch, dtype: torch.dtype) -> None:
    """The adapter stays in fp32 and moves; the direction is float64's up to the base's rounding."""
    exact, engine = make_engine().gradients(batch, GRPO(clip=0.9)), make_engine(dtype=dtype)
    rounded = engine.gradients(batch, GRPO(clip=0.9))
    a = torch.cat([g.double().flatten() for g in exact.values()])
    b = torch.cat([g.double().flatten() for g in rounded.values()])
    assert float(torch.cosine_similarity(a, b, dim=0)) > (0.9999 if dtype == torch.float32 else 0.97)
    before = [p.detach().clone() for p in engine.parameters]
    engine.step(batch, GRPO(clip=0.9))
    assert {p.dtype for p in engine.parameters} == {torch.float32}
    assert all(not torch.equal(p, q) for p, q in zip(engine.parameters, before, strict=True))


def test_a_learning_rate_that_is_a_text_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"AdamW\.lr: must be a finite number at least 0, got '1e-3'"):
        AdamW(lr="1e-3")  # type: ignore[arg-type]
