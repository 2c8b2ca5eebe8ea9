"""The watch on bare loops: a good one raises nothing, each error is reported, nothing of the run is changed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from earnest_audit import StepError, Together, WatchWarning, watch
from earnest_audit.limits import MANY
from earnest_audit.watching.watcher import Watch
from tests.audit.steps import Tiny, logprobs, policy_batch

LOOPS = 24


def loop(
    fault: Callable[[dict[str, Any]], None] | None = None, *, lr: float = 1e-3, dtype: torch.dtype = torch.float32,
    model: nn.Module | None = None,
) -> Watch:  # fmt: skip
    """A small policy-gradient loop; ``fault`` may change what happens in a step."""
    model = (model or Tiny(0)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    group = torch.tensor([0, 0, 0, 1, 1])
    with watch(model, optimizer, every=3) as w:
        for number in range(LOOPS):
            batch = policy_batch(model, number)
            now = logprobs(model, batch)
            mask, a = batch["mask"], batch["advantages"][:, None]
            gap = batch["ref"] - now
            here: dict[str, Any] = {
                "policy": -(a * (now - batch["old"]).exp() * mask).sum() / mask.sum(),
                "kl": ((gap.exp() - gap - 1) * mask).sum() / mask.sum(),
                "behaviour": now.detach().clone(),
                "mask": mask,
                "advantages": batch["advantages"],
                "truncated": torch.tensor([1, 0, 0, 0, 1]),
                "logged_kl": None,
                "number": number,
                "model": model,
            }
            if fault is not None:
                fault(here)
            loss = here["policy"] + 0.1 * here["kl"]
            w.terms({"policy": here["policy"], "kl": 0.1 * here["kl"]})
            loss.backward()
            logged = here["kl"] if here["logged_kl"] is None else here["logged_kl"]
            w.step(
                loss, {"kl": logged}, mask=here["mask"], attention=batch["attention"][:, 1:], group=group,
                advantages=here["advantages"], logprobs=now, behaviour=here["behaviour"], truncated=here["truncated"],
            )  # fmt: skip
            optimizer.step()
            optimizer.zero_grad()
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_good_run_raises_nothing(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        verdict = loop(dtype=dtype).verdict()
    assert verdict.holds, str(verdict)
    assert not [f for f in verdict.findings if f.outcome == "not declared"], str(verdict)


def no_kl(here: dict[str, Any]) -> None:
    here["kl"] = here["kl"].detach()


def constant_kl(here: dict[str, Any]) -> None:
    here["logged_kl"] = 0.0


def not_a_number(here: dict[str, Any]) -> None:
    if here["number"] == 13:  # between two looks: losses and metrics are seen all the same
        here["logged_kl"] = math.nan


def other_sampler(here: dict[str, Any]) -> None:
    here["behaviour"] = here["behaviour"] / 0.7


def no_signal(here: dict[str, Any]) -> None:
    here["advantages"] = torch.zeros(5)


def all_masked(here: dict[str, Any]) -> None:
    here["mask"] = torch.zeros(5, 11)


def all_cut(here: dict[str, Any]) -> None:
    here["truncated"] = torch.ones(5)


def infinite_gradient(here: dict[str, Any]) -> None:
    if here["number"] == 0:
        here["policy"] = here["policy"] + (here["model"].out.bias.sum() * 0.0).sqrt()


@pytest.mark.parametrize(
    ("fault", "subject"),
    [
        (no_kl, "term kl"),
        (constant_kl, "metric kl"),
        (not_a_number, "metric kl"),
        (other_sampler, "sampler = trainer"),
        (no_signal, "groups without a signal"),
        (all_masked, "supervised share"),
        (all_cut, "answers cut at the limit"),
        (infinite_gradient, "gradient of out.bias"),
    ],
)
def test_a_fault_is_seen(fault: Callable[[dict[str, Any]], None], subject: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        verdict = loop(fault).verdict()
    assert subject in {f.subject for f in verdict.failures}, str(verdict)


def everything_supervised() -> None:
    model = Tiny(0)
    with watch(model) as w:
        for _ in range(5):
            loss = model(torch.ones(2, 3, dtype=torch.long)).sum()
            loss.backward()
            w.step(loss, mask=torch.ones(2, 3), attention=torch.ones(2, 3))


def test_everything_supervised_is_seen() -> None:
    with pytest.warns(WatchWarning, match=r"supervised share: 100%"):
        everything_supervised()


def test_a_parameter_without_a_gradient_is_reported_once_by_name() -> None:
    model = Tiny(0)
    model.register_parameter("forgotten", nn.Parameter(torch.ones(3)))
    with pytest.warns(WatchWarning, match=r"No gradient reached forgotten") as seen:
        w = loop(model=model)
    assert len([x for x in seen if issubclass(x.category, WatchWarning)]) == 1
    assert [f.law for f in w.verdict().failures] == ["GL"]


def test_an_update_that_vanishes_in_16_bits_is_seen() -> None:
    """bf16 has 8 bits of mantissa: 1.0 + 1e-4 is 1.0, whatever the gradient."""

    class Gated(Tiny):
        def __init__(self) -> None:
            super().__init__(0)
            self.gate = nn.Parameter(torch.ones(16))

        def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
            kept = self.embed.weight.data
            self.embed.weight.data = kept * self.gate.detach()
            out = super().forward(ids, attention, documents)
            self.embed.weight.data = kept
            return out + (self.gate.sum() - 16) * out.mean()

    with pytest.warns(WatchWarning, match=r"gate get a gradient and do not move"):
        verdict = loop(model=Gated(), lr=1e-4, dtype=torch.bfloat16).verdict()
    assert [f.subject for f in verdict.failures] == ["the parameters' bits"]


def long_loop(
    updates: int, ill: Callable[[int], bool], fault: str, *, may_idle: tuple[str, ...] = (), split: bool = False
) -> Watch:
    """A bare loop of ``updates``, each looked at; while ``ill``, the fault is there."""
    model = Tiny(0).to(torch.bfloat16 if fault == "vanishing" else torch.float32)
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False))
    each = [torch.optim.SGD(ps, lr=0.5) for ps in ((matrices, rest) if split else (matrices + rest,))]
    ids = torch.arange(1, 11).reshape(2, 5)
    with watch(model, Together(*each) if split else each[0], every=1, may_idle=may_idle) as w:
        for number in range(updates):
            now = ill(number)
            held = model.embed.weight.detach() if now and fault == "detached" else model.embed.weight
            logits = torch.func.functional_call(model, {"embed.weight": held}, (ids,))
            loss = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean().neg()
            (loss * (1e-7 if now and fault == "vanishing" else 1.0)).backward()
            w.step(loss, {"kl": 0.0 if now and fault == "constant" else float(loss.detach()) + number})
            for optimizer in each:
                optimizer.step()
                optimizer.zero_grad()
    return w


LATE = {
    "detached": ("7 trainable parameters", "embed.weight had a gradient once"),
    "vanishing": ("the parameters' bits", "get a gradient and do not move"),
    "constant": ("metric kl", "kl became 0 and stays there"),
}


@pytest.mark.parametrize("split", [False, True], ids=["one", "two optimizers"])
@pytest.mark.parametrize("fault", LATE)
def test_what_dies_later_is_reported_once_when_it_is_sure(fault: str, split: bool) -> None:
    subject, sentence = LATE[fault]
    with pytest.warns(WatchWarning, match=sentence) as seen:
        w = long_loop(6 + MANY + 4, lambda n: n >= 6, fault, split=split)
    assert len([x for x in seen if issubclass(x.category, WatchWarning)]) == 1
    assert subject in [f.subject for f in w.verdict().failures], str(w.verdict())


@pytest.mark.parametrize("fault", LATE)
def test_a_short_time_without_a_gradient_is_not_reported(fault: str) -> None:
    """An expert that idles, a plateau: shorter than MANY it is not said at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        verdict = long_loop(6 + MANY + 4, lambda n: 6 <= n < 5 + MANY, fault).verdict()
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize("fault", LATE)
def test_a_gradient_that_returns_holds_at_the_end(fault: str) -> None:
    with pytest.warns(WatchWarning, match=LATE[fault][1]):
        verdict = long_loop(6 + MANY + 4, lambda n: 6 <= n < 8 + MANY, fault).verdict()
    assert verdict.holds, str(verdict)


def test_a_parameter_that_may_idle_is_not_reported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        assert long_loop(6 + MANY, lambda n: n >= 3, "detached", may_idle=("embed.*",)).verdict().holds


def test_the_run_is_bit_equal_with_and_without() -> None:
    def trained(watched: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = Tiny(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        w = watch(model, optimizer, every=1)
        if watched:
            w.__enter__()
        for number in range(6):
            batch = policy_batch(model, number)
            loss = -(logprobs(model, batch) * batch["mask"] * torch.rand(5, 11)).sum()
            if watched:
                w.terms({"all": loss})
            loss.backward()
            if watched:
                w.step(loss, {}, mask=batch["mask"])
            optimizer.step()
            optimizer.zero_grad()
        w.__exit__(None, None, None)
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        return [p.detach() for p in model.parameters()]

    assert all(a.equal(b) for a, b in zip(trained(True), trained(False), strict=True))


def test_what_is_not_handed_over_is_not_declared() -> None:
    model = Tiny(0)
    with watch(model) as w:
        for _ in range(2):
            loss = model(torch.ones(2, 3, dtype=torch.long)).sum()
            loss.backward()
            w.step(loss)
    missing = {f.subject for f in w.verdict().findings if f.outcome == "not declared"}
    assert {"terms", "supervised share", "sampler = trainer", "the parameters' bits"} <= missing


def test_a_learning_rate_of_zero_is_no_vanishing_update() -> None:
    """A warm-up starts at 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        verdict = loop(lr=0.0).verdict()
    assert not verdict.failures, str(verdict)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: watch(Tiny(0), every=0), "every=0"),
        (lambda: watch(Tiny(0)).step(1.0, maks=torch.ones(2)), r"unknown signal 'maks': did you mean 'mask'\?"),
    ],
)
def test_a_wrong_call_says_so(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        make()
    assert isinstance(error.value, StepError) or "every" in sentence


def test_terms_under_reentrant_checkpointing_are_left_alone_with_a_word() -> None:
    """torch refuses a term's own gradient there; the run goes on."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with watch(model, optimizer, every=1) as w:
            for _ in range(12):
                x = torch.randn(3, 4, requires_grad=True)
                loss = model[1](checkpoint(model[0], x, use_reentrant=True)).square().mean()
                w.terms({"a": loss, "b": 0.5 * loss})
                loss.backward()
                w.step(loss)
                optimizer.step()
                optimizer.zero_grad()
        assert w.updates == 12

    with pytest.warns(WatchWarning, match="use_reentrant=False"):
        run()


def test_a_loss_that_is_no_number_is_told_at_once() -> None:
    """Not at the next look, which may be many updates away, or never where the run then ends with an error."""
    model = Tiny(0)
    w = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1000)
    w.updates = 6
    assert not w.due
    with pytest.warns(WatchWarning, match="metric loss: nan at update 7"):
        w.step(float("nan"))


@pytest.mark.parametrize("stuck", [False, True])
def test_a_bias_before_a_norm_warns_and_a_weight_that_never_moves_fails(stuck: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    if stuck:
        model[0].weight.data.fill_(1e6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(), watch(model, optimizer, every=1) as w:
        warnings.simplefilter("ignore")
        for _ in range(2 * MANY):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            w.step(loss)
            optimizer.step()
            optimizer.zero_grad()
    verdict = w.verdict()
    assert verdict.holds != stuck, str(verdict)
    assert [f.subject for f in verdict.warnings] == ["parameters whose gradient cancels"], str(verdict)


def test_metrics_that_are_no_real_numbers_do_not_end_the_run() -> None:
    w, day = Watch(nn.Linear(2, 1)), np.datetime64("2026-01-01")
    metrics: Any = {"text": np.str_("3"), "huge": 10**400, "complex": 1j, "day": day, 1: 2.0, "nan": np.float32("nan")}
    with pytest.warns(WatchWarning, match="metric nan"):
        w.step(torch.tensor(1.0), metrics)
    assert [f.subject for f in w.verdict().failures] == ["metric nan"]


@pytest.mark.parametrize("metric", [True, False])
def test_an_event_is_one_failing_row(metric: bool) -> None:
    """From the seventh update on every gradient is undefined, as every metric is where any is logged."""
    model = Tiny(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", WatchWarning)
        with watch(model, optimizer, every=3) as w:
            for number in range(16):
                loss = model(torch.ones(2, 3, dtype=torch.long)).square().mean() * (math.nan if number == 6 else 1.0)
                loss.backward()
                w.step(loss if metric else None)
                optimizer.step()
                optimizer.zero_grad()
    (failure,) = w.verdict().failures
    assert failure.subject == ("metric loss" if metric else "gradient of embed.weight") and len(said) == 1
    count = len(list(model.parameters())) - (not metric)
    assert failure.measured == f"nan at update 7, then {count} more" and "gradient of out.bias" not in failure.meaning
    assert f"Then came {'gradient of embed.weight' if metric else 'gradient of '}" in failure.meaning


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_several_epochs_over_one_batch_are_no_other_sampler(minibatches: int, arrives: bool) -> None:
    """The rows of the sampler come again, in another order, when the policy has moved."""
    model = Tiny(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    far = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        with watch(model, optimizer, every=1) as w:
            for number in range(3):
                batch = policy_batch(model, number)
                old = logprobs(model, batch).detach() / (1.0 if arrives else 0.7)
                for _ in range(4):
                    for rows in torch.randperm(5).chunk(minibatches):
                        now = logprobs(model, batch)
                        far = max(far, (now - old).abs().mean().item())
                        (now[rows] * batch["advantages"][rows, None]).mean().backward()
                        w.step(logprobs=now[rows], behaviour=old[rows], mask=batch["mask"][rows])
                    optimizer.step()
                    optimizer.zero_grad()
    (row,) = [f for f in w.verdict().findings if f.subject == "sampler = trainer"]
    assert far > 0.2 and "without 45 rows that came again" in row.measured
    assert row.outcome == ("holds" if arrives else "fails") and (arrives or "stale=" in row.meaning), str(row)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_norm_that_overflows_fails_where_the_optimizer_steps_all_the_same(scaled: bool) -> None:
    """A scaler skips these steps, and halves its scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
    with warnings.catch_warnings(), watch(model, optimizer) as w:
        warnings.simplefilter("ignore", WatchWarning)
        for number in range(60):
            x = torch.randn(4, 3)
            with torch.autocast("cpu", torch.float16):
                loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            w.step(loss, {"train/grad_norm": norm if scaled or number != 30 else math.inf})
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [f.subject for f in w.verdict().failures] == ([] if scaled else ["metric grad_norm"]), str(w.verdict())
