"""The watch: steps of the optimizer, gradients at them, training mode."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import nn

from earnest_audit import Verdict, WatchWarning, watch
from earnest_audit.limits import ENOUGH, MANY
from earnest_audit.watching.signals import KNOWN
from earnest_audit.watching.watcher import Watch
from tests.audit.steps import Tiny, sft_loss, sft_step

BATCH = sft_step().batch


SIGNALS = {"mask": torch.tensor([[0.0, 1.0]]), "attention": torch.ones(1, 2)}


@pytest.fixture(autouse=True)
def _a_warning_is_an_alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of faults take their warnings themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        yield


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def backward(model: nn.Module, w: Watch, number: int, scale: float = 1.0) -> None:
    loss = sft_loss(model, BATCH)[0] * (1 + 0.1 * math.sin(number))
    (loss * scale).backward()
    w.step(loss, {"kl": loss.item() + number}, **SIGNALS)


def row(verdict: Verdict, subject: str) -> Any:
    return next((f for f in verdict.findings if f.subject == subject), None)


def forgotten(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch, calls: int) -> None:
    """No step at all."""
    for number in range(calls):
        backward(model, w, number)
        optimizer.zero_grad()


def another(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch, calls: int) -> None:
    """Another optimizer of the same parameters steps."""
    other = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(calls):
        backward(model, w, number)
        other.step()
        other.zero_grad()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch, calls: int) -> None:
    for number in range(calls):
        backward(model, w, number)
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.01 * p.grad
        model.zero_grad()


def without_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch, calls: int) -> None:
    """Nothing is differentiated, and nothing stepped."""
    for _ in range(calls):
        with torch.no_grad():
            w.step(sft_loss(model, BATCH)[0], **SIGNALS)


@pytest.mark.parametrize("calls", [1, 3, ENOUGH, MANY, 45])
@pytest.mark.parametrize("broken", [forgotten, another, by_hand, without_gradients])
def test_a_run_without_a_step_never_holds(broken: Callable[..., None], calls: int) -> None:
    model = Tiny(0)
    optimizer = sgd(model)
    sure = calls >= (ENOUGH if broken in (another, by_hand) else MANY)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", WatchWarning)
        with watch(model, optimizer) as w:
            broken(model, optimizer, w, calls)
    verdict = w.verdict()
    found = row(verdict, "the optimizer's steps")
    assert not verdict.holds and found.measured == f"{calls} calls of w.step, no step of the optimizer was seen"
    assert found.outcome == ("fails" if sure else "not applicable"), str(verdict)
    moved = "something else steps them" in found.meaning
    assert moved == (broken in (another, by_hand))
    assert len(said) == sure, [str(x.message) for x in said]


def test_an_optimizer_of_a_copy_of_the_model_that_never_steps_is_seen() -> None:
    model = Tiny(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        with watch(model, sgd(Tiny(0))) as w:
            another(model, sgd(model), w, 6)
    assert [f.subject for f in w.verdict().failures] == ["the optimizer's steps"]


def test_another_optimizer_is_reported_while_the_run_goes_on() -> None:
    model = Tiny(0)

    def run() -> None:
        with watch(model, sgd(model)) as w:
            another(model, sgd(model), w, MANY + 1)

    with pytest.raises(WatchWarning, match=f"{MANY} calls of w.step, no step of the optimizer was seen"):
        run()


@pytest.mark.parametrize("steps", [3, MANY])
def test_the_last_of_several_optimizers_has_to_step(steps: int) -> None:
    model = Tiny(0)
    parts = [[p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False)]
    each = [torch.optim.SGD(ps, lr=0.05) for ps in parts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        with watch(model, each) as w:
            for number in range(steps):
                backward(model, w, number)
                each[0].step()
                model.zero_grad()
    verdict = w.verdict()
    assert not verdict.holds and row(verdict, "the optimizer's steps").measured == f"{steps} began, none ended"
    assert (row(verdict, "the optimizer's steps").outcome == "fails") == (steps >= MANY)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("replaced", [True, False])
def test_an_optimizer_that_steps_no_longer_is_reported(replaced: bool, accumulated: int) -> None:
    """It was made anew on the way, and only the first is watched."""
    model = Tiny(0)
    optimizer = sgd(model)
    with watch(model, optimizer) as w:
        for number in range(35 * accumulated):
            if number == 12 * accumulated and replaced:
                optimizer = sgd(model)
            backward(model, w, number)
            if (number + 1) % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
    verdict = w.verdict()
    found = row(verdict, "the optimizer's steps")
    assert verdict.holds and (found.outcome if found else None) == ("not declared" if replaced else None)
    assert not replaced or found.measured.startswith(f"none in the last {23 * accumulated} of {35 * accumulated} calls")


def test_a_watch_that_was_never_begun_says_so() -> None:
    model = Tiny(0)
    optimizer = sgd(model)
    w = watch(model, optimizer)
    for number in range(30):
        backward(model, w, number)
        optimizer.step()
        optimizer.zero_grad()
    verdict = w.verdict()
    assert not verdict.holds and not verdict.failures
    assert "never begun" in row(verdict, "the optimizer's steps").meaning


@pytest.mark.parametrize("accumulated", [1, 8, 64])
def test_an_accumulation_raises_nothing(accumulated: int) -> None:
    """Many calls a step; a verdict before the first step neither holds nor fails."""
    model = Tiny(0)
    optimizer = sgd(model)
    with watch(model, optimizer, every=1) as w:
        for number in range(5 * accumulated):
            backward(model, w, number, 1 / accumulated)
            if number == accumulated - 1:
                early = w.verdict()
                assert not early.holds and not early.failures
            if (number + 1) % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
    verdict = w.verdict()
    assert verdict.holds and w.updates == 5, str(verdict)


def after(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch) -> None:
    """w.step after the optimizer's."""
    for number in range(6):
        optimizer.zero_grad()
        loss = sft_loss(model, BATCH)[0]
        loss.backward()
        optimizer.step()
        w.step(loss, {"kl": number}, **SIGNALS)


def cleared(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch) -> None:
    """… and after zero_grad."""
    for number in range(6):
        loss = sft_loss(model, BATCH)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss, {"kl": number}, **SIGNALS)


def once(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch) -> None:
    backward(model, w, 0)
    optimizer.step()


def with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch) -> None:
    for number in range(6):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = sft_loss(model, BATCH)[0]
            loss.backward()
            return loss

        w.step(closure(), {"kl": number}, **SIGNALS)
        optimizer.step(closure)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(
    ("kind", "clears"), [(torch.optim.LBFGS, "inside"), (torch.optim.SGD, "inside"), (torch.optim.SGD, "outside")]
)
def test_a_closure_makes_its_gradients_inside_the_step(kind: Any, clears: str, by_name: bool) -> None:
    """Lightning's loop, and that of LBFGS: the run is the same with and without a watch."""
    ends = []
    for watched in (True, False):
        model = Tiny(0)
        optimizer = kind(model.parameters(), lr=0.05)
        with watch(model, optimizer, every=1) as w:
            if not watched:
                w.__exit__(None, None, None)
            for number in range(6):

                def closure(
                    m: Any = model, o: Any = optimizer, n: int = number, on: Any = w if watched else None
                ) -> Any:
                    if clears == "inside":
                        o.zero_grad()
                    loss = sft_loss(m, BATCH)[0]
                    loss.backward()
                    if on is not None:
                        on.step(loss, {"kl": loss.item() + n}, **SIGNALS)
                    return loss

                optimizer.step(closure=closure) if by_name else optimizer.step(closure)
                if clears == "outside":
                    optimizer.zero_grad()
        assert not watched or (w.verdict().holds and w.updates == 6), str(w.verdict())
        ends.append([p.detach() for p in model.parameters()])
    assert all(a.equal(b) for a, b in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("power", [0, 100, 126])
def test_a_scaler_may_skip_its_first_steps(power: int) -> None:
    model = Tiny(0)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power, backoff_factor=2.0**-6)
    with watch(model, optimizer, every=1) as w:
        for number in range(16):
            loss = sft_loss(model, BATCH)[0] * 64
            scaler.scale(loss).backward()
            w.step(loss, {"kl": number}, **SIGNALS)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert w.verdict().holds and (w.updates < 16) == (power == 126), (str(w.verdict()), w.updates)


def skipped(model: nn.Module, optimizer: torch.optim.Optimizer, w: Watch) -> None:
    """A scaler that begins too high skips its first steps."""
    for number in range(24):
        backward(model, w, number, 1.0)
        if number > 16:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("right", [after, cleared, once, with_a_closure, skipped])
def test_right_loops_hold(right: Callable[..., None]) -> None:
    model = Tiny(0)
    optimizer = sgd(model)
    with watch(model, optimizer, every=2) as w:
        right(model, optimizer, w)
    verdict = w.verdict()
    assert verdict.holds, str(verdict)
    assert row(verdict, "the optimizer's steps") is None


@pytest.mark.parametrize("calls", [1, 40])
def test_a_run_that_was_stopped_is_not_accused(calls: int) -> None:
    model = Tiny(0)
    optimizer = sgd(model)
    w = watch(model, optimizer)

    def run() -> None:
        with w:
            forgotten(model, optimizer, w, calls)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not w.verdict().holds and not w.verdict().failures


@pytest.mark.parametrize("steps", [1, 4])
def test_accelerates_optimizer_is_watched_from_inside(steps: int) -> None:
    GradientState._reset_state()  # one per process: a trainer's in an earlier test
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    plain = Tiny(0)
    model, optimizer = accelerator.prepare(plain, sgd(plain))
    with watch(model, optimizer, every=1) as w:
        for number in range(6 * steps):
            with accelerator.accumulate(model):
                loss = sft_loss(model, BATCH)[0]
                accelerator.backward(loss)
                w.step(loss, {"kl": number}, **SIGNALS)
                optimizer.step()
                optimizer.zero_grad()
    GradientState._reset_state()
    assert w.verdict().holds and w.updates == 6, str(w.verdict())


@pytest.mark.parametrize("updates", [1, 3, 4, 30])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_thrown_away_are_seen(to_none: bool, updates: int) -> None:
    model = Tiny(0)
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        with watch(model, optimizer) as w:
            for number in range(updates):
                backward(model, w, number)
                optimizer.zero_grad(set_to_none=to_none)
                optimizer.step()
    verdict = w.verdict()
    found = row(verdict, "gradients at the optimizer's step")
    assert not verdict.holds and found.outcome == ("fails" if updates >= ENOUGH else "not applicable")
    assert updates < ENOUGH or "between backward and step" in found.meaning


def test_a_step_before_any_backward_never_holds() -> None:
    model = Tiny(0)
    optimizer = sgd(model)
    with watch(model, optimizer) as w:
        for _ in range(2):
            w.step(1.0, **SIGNALS)
            optimizer.step()
    assert not w.verdict().holds and not w.verdict().failures


class Mixed(Tiny):
    """With something that training mode changes."""

    def __init__(self, p: float = 0.1, norm: bool = False) -> None:
        super().__init__(0)
        self.drop = nn.Dropout(p)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, ids: Any, attention: Any = None, documents: Any = None) -> Any:
        return self.drop(super().forward(ids, attention, documents))


def moded(
    model: nn.Module, before: Callable[[int], Any], updates: int = 12, between: Callable[[int], Any] = lambda _: None,
    **more: Any,
) -> Verdict:  # fmt: skip
    optimizer = sgd(model)
    with watch(model, optimizer, every=10, may_idle=("norm.*",), **more) as w:
        for number in range(updates):
            before(number)
            loss = sft_loss(model, BATCH)[0]
            loss.backward()
            between(number)
            w.step(loss, {"kl": number}, **SIGNALS)
            optimizer.step()
            optimizer.zero_grad()
    return w.verdict()


@pytest.mark.parametrize("at", [1, 5, 8])
def test_an_evaluation_that_is_never_undone_is_seen(at: int) -> None:
    model = Mixed()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", WatchWarning)
        found = row(moded(model, lambda n: model.eval() if n == at else None), "training mode")
    assert len(said) == 1, "at the end of the loop: before, it may still be undone"
    assert found.outcome == "fails" and found.measured.startswith(f"off in the last {12 - at} updates, on in {at} ")
    with pytest.raises(WatchWarning, match=r"without model\.train"):
        moded(model.train(), lambda n: model.eval() if n == at else None, MANY + at + 1)


def test_right_loops_keep_their_mode() -> None:
    model = Mixed()
    goes_back = moded(model, lambda n: (model.eval(), model.train()))
    assert goes_back.holds and row(goes_back, "training mode") is None
    late = moded(model, lambda n: model.train(), 50, between=lambda n: model.eval() if n % 10 == 0 else None)
    assert late.holds and row(late, "training mode") is None, "an evaluation between backward and step, when looked at"
    model.train()
    at_the_end = moded(model, lambda n: model.eval() if n == 9 else None)
    assert at_the_end.holds, "too short to be told"
    model.train()
    frozen = moded(model, lambda n: model.drop.eval() if n == 4 else None, 40)
    assert frozen.holds and row(frozen, "training mode") is None, "one module's mode is a choice"


@pytest.mark.parametrize(
    ("model", "at", "outcome"),
    [
        (Mixed(), 0, "warns"),  # from the start, by intention or not
        (Mixed(0.0, norm=True), 0, "not declared"),
        (Mixed(0.0, norm=True), 5, "not declared"),  # batch norms are frozen so
        (Mixed(0.0), 5, None),  # nothing that the mode changes
        (Tiny(0), 5, None),
    ],
)
def test_what_may_be_meant_is_only_reported(model: nn.Module, at: int, outcome: str | None) -> None:
    verdict = moded(model, lambda n: model.eval() if n == at else None, 40)
    found = row(verdict, "training mode")
    assert verdict.holds and (found.outcome if found else None) == outcome, str(verdict)
    assert found is None or found.measured.endswith(f": 1 {'dropout' if outcome == 'warns' else 'batch norm'}")


def test_a_mode_may_be_left_by_declaration() -> None:
    model = Mixed()
    for at in (0, 5):
        verdict = moded(model.train(), lambda n, at=at: model.eval() if n == at else None, 40, may_eval=True)  # type: ignore[misc]
        assert verdict.holds and row(verdict, "training mode") is None


def test_a_warning_points_at_the_line_of_the_user() -> None:
    model = Tiny(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", WatchWarning)
        with watch(model, optimizer, every=1) as w:
            for number in range(6):
                backward(model, w, number)
                optimizer.step()
                optimizer.zero_grad()
    line = test_a_warning_points_at_the_line_of_the_user.__code__.co_firstlineno + 8
    assert [(Path(x.filename).name, x.lineno) for x in said] == [("test_training.py", line)]


def test_the_help_of_a_step_lists_every_signal() -> None:
    assert all(f"``{name}``" in str(Watch.step.__doc__) for name in KNOWN)


@pytest.mark.parametrize("kind", ["a rollout in eval", "an average is swapped in", "a critic first", "several epochs"])
def test_ordinary_loops_raise_nothing(kind: str) -> None:
    model = Mixed()
    policy = torch.optim.AdamW([p for n, p in model.named_parameters() if n != "out.bias"], lr=1e-3)
    critic = torch.optim.AdamW([model.out.bias], lr=1e-3)
    average = {k: v.clone() for k, v in model.state_dict().items()}
    with watch(model, policy if kind == "a critic first" else [policy, critic], every=1) as w:
        for number in range(60):
            if kind == "a rollout in eval":
                model.eval()
                with torch.no_grad():
                    sft_loss(model, BATCH)
                model.train()
            if kind == "an average is swapped in":
                kept = {k: v.clone() for k, v in model.state_dict().items()}
                model.load_state_dict(average)
                model.load_state_dict(kept)
            for _ in range(3 if kind == "several epochs" else 1):
                backward(model, w, number)
                if kind != "a critic first" or number >= 30:
                    policy.step()
                critic.step()
                model.zero_grad()
    verdict = w.verdict()
    told = {"the optimizer's steps", "gradients at the optimizer's step", "training mode"}
    assert verdict.holds and not told & {f.subject for f in verdict.findings}, str(verdict)
