"""What an audit restores (dropout, the optimizer, buffers), and steps that refuse, sample, overflow or use autocast."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from earnest_audit import Metric, Setting, Step, audit, restore
from earnest_audit.gradient import Gradient
from earnest_audit.laws import knobs, liveness, masks, splits
from earnest_audit.measure import numbers
from earnest_audit.probe import Probe
from earnest_audit.verdict import Verdict
from tests.audit.steps import Tiny, most, policy_step, sft_loss, sft_step


def measured(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.measured for f in verdict.findings}


class Dropped(Tiny):
    """A dropout module, a functional rate, and a running statistic that must stay in train mode."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.drop, self.attention_dropout = nn.Dropout(0.1), 0.2
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        assert self.training and self.drop.training, "the audit changes no mode"
        y = self.drop(super().forward(ids, attention, documents))
        return F.dropout(y, self.attention_dropout, self.training)


def on(model: nn.Module, loss: Any = sft_loss, **more: Any) -> Step:
    step = sft_step()
    return Step(model=model, loss=loss, batch=step.batch, roles=step.roles, **more)


def test_dropout_is_off_while_audited_and_back_afterwards() -> None:
    model = Dropped()
    verdict = audit(on(model))
    assert verdict.holds, str(verdict)
    assert (model.drop.p, model.attention_dropout) == (0.1, 0.2)
    assert str(verdict).count("dropout was switched off for the audit (2 rates above 0)") == 1
    assert not any("dropout" in note for note in audit(on(Tiny()), quick=True).notes)


def test_dropout_of_a_hugging_face_model() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=32, n_embd=8, n_layer=1, n_head=2))
    model.train()

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return model(input_ids=batch["ids"], attention_mask=batch["attention"], labels=batch["labels"]).loss

    verdict = audit(on(model, loss), laws=[splits.LAW, masks.LAW])
    assert verdict.holds and verdict.notes, str(verdict)
    rates = (model.config.attn_pdrop, model.config.resid_pdrop, model.config.embd_pdrop, model.transformer.drop.p)
    assert rates == (0.1,) * 4


class Master(torch.optim.Optimizer):
    """fp32 master weights of bf16 parameters, and a list, a window and a set that change with every update."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.updates = 0
        self.history: list[int] = []
        self.window, self.seen = deque[int](maxlen=2), set[int]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for add in (self.history.append, self.window.append, self.seen.add):
            add(self.updates)
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.float().clone())
                master -= group["lr"] * p.grad.float()
                p.copy_(master)


def test_the_optimizer_is_restored_into_the_same_objects() -> None:
    step, model = sft_step(), Tiny().bfloat16()
    optimizer, updates = Master(model.parameters()), 0

    def count(*_: Any) -> None:
        nonlocal updates
        updates += 1

    handle = optimizer.register_step_post_hook(count)
    sft_loss(model, step.batch)[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    group, master, history = optimizer.param_groups[0], optimizer.state[model.head.weight]["master"], optimizer.history
    bits = master.clone()
    verdict = audit(on(model, optimizer=optimizer), laws=[liveness.LAW])
    assert any("changed their bits" in f.measured and f.outcome == "holds" for f in verdict.findings)
    assert optimizer.param_groups[0] is group and group["lr"] == 0.01
    assert optimizer.state[model.head.weight]["master"] is master
    assert optimizer.history is history and history == [1]
    assert list(optimizer.window) == [1] and optimizer.window.maxlen == 2 and optimizer.seen == {1}
    assert master.dtype == torch.float32 and master.equal(bits) and not bits.equal(bits.bfloat16().float())
    assert updates == optimizer.updates == 1, "neither the hook nor the optimizer has seen the audit's updates"
    assert list(optimizer._optimizer_step_post_hooks.values()) == [count]
    handle.remove()
    assert not optimizer._optimizer_step_post_hooks


class Checkpointed(Tiny):
    """Two blocks; below the first lies no parameter where the embedding is frozen: ``autograd.grad`` passes it by."""

    def __init__(self, reentrant: bool, frozen: bool) -> None:
        super().__init__(0)
        self.reentrant = reentrant
        self.embed.requires_grad_(not frozen)

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_(True)  # what enable_input_require_grads does
        y: Tensor = checkpoint(self.mix, x, use_reentrant=self.reentrant)
        return self.head(torch.tanh(checkpoint(self.out, y.chunk(3, -1)[0], use_reentrant=self.reentrant)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", [sft_step, policy_step])
def test_reentrant_checkpointing_is_audited_like_any_other(family: Callable[[], Step], frozen: bool) -> None:
    found = []
    for reentrant in (True, False):
        step, model = family(), Checkpointed(reentrant, frozen)
        trained = [p for p in model.parameters() if p.requires_grad]
        step.model, step.optimizer = model, torch.optim.AdamW(trained, lr=1e-2)
        step.roles = {r: k for r, k in step.roles.items() if r != "attention"}
        kept, updates = torch.ones_like(model.head.weight), []
        model.head.weight.grad = kept
        model.head.weight.register_post_accumulate_grad_hook(updates.append)
        verdict = audit(step)
        assert verdict.holds, str(verdict)
        assert model.head.weight.grad is kept and bool((kept == 1).all()) and not updates
        assert model.head.weight._post_accumulate_grad_hooks
        # One step more shows how to pull: the budget may be spent one row earlier.
        found.append({f.subject: f for f in verdict.findings if "the budget is spent" not in f.measured})
    assert len(found[1]) - len(found[0]) in (0, 1) and found[0].items() <= found[1].items()


def test_nan_is_far_from_everything() -> None:
    nan, one = Gradient({"p": torch.tensor([float("nan"), 1.0])}), Gradient({"p": torch.ones(2)})
    assert nan.distance(one) == one.distance(nan) == nan.distance(nan) == float("inf")


@pytest.mark.may_not_be_checked
def test_a_step_that_refuses_changes_is_audited_all_the_same() -> None:
    """Asserts on a setting, on the number of rows and on the width: each is a row, none ends the audit."""

    def strict(model: nn.Module, batch: Mapping[str, Any], share: float, weight: float) -> Any:
        assert 0 <= share <= 0.6 and weight <= 1
        if batch["ids"].shape != (5, 12):
            raise NotImplementedError("five rows of twelve")
        value = sft_loss(model, batch)[0]
        return value * (1 + share) + weight * value.square(), {"square": value.square()}

    step = on(Tiny(), strict, settings={"share": 0.5, "weight": 0.7}, metrics={"square": Metric(weight="weight")})
    verdict = audit(step, laws=[liveness.LAW, knobs.LAW, splits.LAW, masks.LAW])
    assert verdict.holds, str(verdict)
    found = measured(verdict)
    assert found["setting share"].endswith(": 0.5 → 0.25")
    assert found["term square"].startswith("could not be checked (AssertionError")
    assert found["every row twice"] == "could not be checked (NotImplementedError: five rows of twelve)"
    assert found["whole = parts"] == "a part of the rows cannot be run alone (NotImplementedError)"
    assert found["a fully masked row"] == "one more row cannot be run (NotImplementedError)"
    assert {f.subject for f in verdict.errors} == {"term square", "every row twice"}


def test_autocast_is_seen_and_is_legitimate() -> None:
    """In fp32's room the same step fails; broken under autocast it fails all the same."""
    step = sft_step()
    plain = step.loss

    def cast(model: Any, batch: Mapping[str, Any], **knobs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(model, batch, **knobs)

    step.loss = cast
    verdict = audit(step)
    assert verdict.holds, str(verdict)
    assert any("compute in bfloat16" in note for note in verdict.notes)
    step.loss = lambda model, batch: cast(model, {**batch, "labels": batch["labels"].roll(1, 0)})
    assert not audit(step).holds
    assert not any("compute in" in note for note in audit(sft_step(), quick=True).notes)


class Centred(Tiny):
    """Subtracts a running mean of its outputs, which every forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        y = super().forward(ids, attention, documents)
        with torch.no_grad():
            self.centre.mul_(0.5).add_(0.5 * y.mean())
            self.calls = self.calls + 1  # replaced, not written into
        return y * (1 + self.centre)


def test_what_a_forward_pass_writes_does_not_reach_the_next_one() -> None:
    step, model = sft_step(), Centred()
    step.model, step.loss = model, sft_loss
    probe = Probe(step)
    with probe.open():
        first, again = probe.gradient(dict(step.batch)), probe.gradient(dict(step.batch))
        assert first.distance(again) == 0
        assert float(model.calls) == 1, "one pass since they were restored"
    assert float(model.calls) == 0 and float(model.centre) == 0


class Normalised(Tiny):
    """Statistics of the batch, and running ones that the backward pass must find as the forward pass left them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(super().forward(torch.zeros(1, 2, dtype=torch.long)).shape[-1])

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return self.norm(super().forward(ids, attention, documents).flatten(0, 1)).reshape(*ids.shape, -1)


def test_running_statistics_do_not_disturb_the_backward_pass() -> None:
    step = sft_step()
    step.model, step.loss, step.rows_interact = Normalised(), sft_loss, True
    verdict = audit(step, quick=True)
    assert not verdict.errors, str(verdict)


def test_the_budget_is_the_promise() -> None:
    step = policy_step()
    probe = Probe(step)
    assert probe.budget == pytest.approx(most(step))
    probe.cost = probe.budget - 5
    assert probe.afford(1) and not probe.afford(2)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_step_whose_gradient_jumps_is_noted(rounds: bool) -> None:
    """The largest weight is rounded at a tie, wherever it is: its last place decides which way, and the tolerance is
    wide."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.detach().abs().amax(1, keepdim=True) / 7.5
            rounded = self.weight + ((self.weight / scale).round() * scale - self.weight).detach()
            return x @ (rounded if rounds else self.weight).T

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    notes = audit(Step(Rounded(), loss, {"x": x, "y": x.repeat(1, 3)})).notes
    assert any("count as equal up to" in note for note in notes) is rounds, notes


class Statistics:
    """Not a module, as many running means are."""

    def __init__(self) -> None:
        self.mean, self.count = np.zeros(2), 0


class Keeping(nn.Linear):
    """A forward pass that writes into every kind of attribute."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.calls, self.recent, self.seen = 0, deque([0], maxlen=4), {0}
        self.cache: dict[str, list[int]] = {"calls": []}
        self.mean, self.statistics = torch.zeros(1), Statistics()
        self.rng, self.random = torch.Generator().manual_seed(0), random.Random(0)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.recent.append(self.calls)
        self.seen.add(self.calls)
        self.cache["calls"].append(self.calls)
        self.cache[str(self.calls)] = []
        y = super().forward(self.drop(x)) + 0 * torch.rand(1, generator=self.rng) + 0 * self.random.random()
        self.mean.lerp_(y.detach().mean(0), 0.1)
        self.statistics.mean += 1
        self.statistics.count += 1
        return y

    def state(self) -> Any:
        """Everything that an audit has to restore, and that can be compared."""
        own = (self.calls, [*self.recent], {*self.seen}, copy.deepcopy(self.cache), self.mean.tolist())
        drawn = (self.rng.get_state().tolist(), self.random.getstate(), torch.get_rng_state().tolist())
        other = (random.getstate(), np.random.get_state()[1].tolist(), torch.is_grad_enabled())  # noqa: NPY002
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.modules()]
        numeric = (self.statistics.mean.tolist(), self.statistics.count, self.drop.p, self.training, hooks)
        weights = [(p.tolist(), None if p.grad is None else p.grad.tolist()) for p in self.parameters()]
        return own, drawn, other, numeric, weights


def kept_step() -> tuple[Keeping, Step]:
    torch.manual_seed(0)
    model = Keeping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: None)
    batch = {"x": torch.randn(4, 3)}
    model(batch["x"]).sum().backward()
    return model, Step(model, lambda m, b: (m(b["x"]) - 1).square().mean(), batch, optimizer=optimizer)


def test_attributes_of_modules_are_restored() -> None:
    model, step = kept_step()
    before = model.state()
    assert not audit(step, quick=True).errors
    assert model.state() == before


def test_what_can_be_read_only_once_is_noted() -> None:
    model, step = kept_step()
    model.ticks = itertools.count()
    assert any(note.startswith("what the audit read of ticks was not") for note in audit(step, quick=True).notes)


class Interrupts:
    """Raises where ``restore.py`` comes to its ``at``-th line; counts and names the lines on the way."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, list[int]()

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != restore.__file__:
            return None
        if event == "line":
            self.lines.append(frame.f_lineno)
            if len(self.lines) - 1 == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_leaves_nothing_behind() -> None:
    """The first and the last time that each line of restore.py is run."""

    def traced(interrupts: Interrupts) -> None:
        model, step = kept_step()
        probe, before = Probe(step), model.state()
        tracer = sys.gettrace()
        sys.settrace(interrupts)
        try:
            with probe.open(), probe.perturbed(), restore.observed([model], lambda *_: None):
                probe.look()
                with restore.with_dropout(probe.dropout), probe.training(), restore.replaced(model, {"calls": 3}):
                    probe.own_gradient()
                    step.optimizer.step()  # type: ignore[union-attr]
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        line = interrupts.lines[-1]
        assert model.state() == before, f"restore.py:{line}"
        assert len(step.optimizer._optimizer_step_post_hooks) == 1, f"restore.py:{line}"  # type: ignore[union-attr]

    traced(whole := Interrupts())
    lines = whole.lines
    first = {line: number for number, line in reversed([*enumerate(lines)])}
    for at in sorted({*first.values(), *({line: number for number, line in enumerate(lines)}).values()}):
        traced(Interrupts(at))


@pytest.mark.parametrize("inside", [False, True])
def test_a_reentrant_checkpoint_leaves_no_gradient_in_other_modules(inside: bool) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(8, 8), nn.Linear(8, 3)
    batch = {"x": torch.randn(6, 8), "y": torch.tensor([0, 1, 2, 0, 1, 2])}

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        part = (lambda h: other(model(h))) if inside else model
        found = checkpoint(part, batch["x"].clone().requires_grad_(), use_reentrant=True)
        return F.cross_entropy(found if inside else other(found), batch["y"])

    assert not audit(Step(model, loss, batch), quick=True).failures
    assert other.weight.grad is None and other.bias.grad is None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_differentiates_inside_is_looked_at_with_a_graph(sign: int) -> None:
    """A gradient penalty, logged with the right sign or with the wrong one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(model: nn.Module, batch: Mapping[str, Any], weight: float) -> Any:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = slope.square().sum(-1).mean()
        return (model(x) - batch["y"]).square().mean() + weight * penalty, {"penalty": sign * penalty}

    verdict = audit(Step(
        model, loss, {"x": torch.randn(8, 3), "y": torch.randn(8, 1)}, settings={"weight": Setting(1.0, "weight")},
        metrics={"penalty": Metric(low=0.0, weight="weight")}, value_is_loss=True,
    ))  # fmt: skip
    assert not verdict.errors and verdict.holds == (sign > 0), str(verdict)
    assert any(f.law == "FD" and f.outcome == "holds" for f in verdict.findings)


@dataclass(frozen=True)
class Inputs:
    x: Tensor


@pytest.mark.parametrize("kind", [Inputs, SimpleNamespace, pack_padded_sequence])
def test_records_in_a_batch_are_copied_and_have_rows(kind: Any) -> None:
    torch.manual_seed(0)
    x, packed = torch.randn(5, 2, 3), kind is pack_padded_sequence
    lengths = torch.tensor([2, 1, 2, 1, 2])
    inputs = kind(x, lengths, batch_first=True, enforce_sorted=False) if packed else kind(x=x)
    batch = {"inputs": inputs, "y": torch.tensor([0, 2, 1, 0, 2])}

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        given = batch["inputs"]
        (given.data if packed else given.x).mul_(1.01)
        rows = pad_packed_sequence(given, batch_first=True)[0] if packed else given.x
        return F.cross_entropy(model(rows.flatten(1)), batch["y"])

    before = (inputs.data if packed else inputs.x).clone()
    verdict = audit(Step(nn.Linear(6, 3), loss, batch))
    assert verdict.holds and any(f.law == "SE" and f.outcome == "holds" for f in verdict.findings), str(verdict)
    assert torch.equal(before, inputs.data if packed else inputs.x)


def test_metrics_that_are_no_real_numbers_are_left_out() -> None:
    logged = {
        "loss": torch.tensor(2.0), "text": np.str_("3"), "huge": 10**400, "complex": 1j, "spectrum": torch.tensor(1j),
        "day": np.datetime64("2026-01-01"), "none": None, "half": np.float16(0.5), "on": np.bool_(True), 1: 3,
    }  # fmt: skip
    assert numbers(logged) == {"loss": 2.0, "half": 0.5, "on": 1.0, "1": 3.0}
    assert numbers(None) == {}
