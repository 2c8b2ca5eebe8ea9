"""What a watch counts of a run: steps of the optimizer, training mode, gradients that are cleared between two updates,
the logged norm, learning rates, parameters without an optimizer."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from earnest_audit.laws.liveness import some
from earnest_audit.limits import ENOUGH, MANY
from earnest_audit.verdict import Finding, Outcome, judged

FEW = 3  # parameters that are compared
SAMPLE = 4096  # entries of a parameter that are compared
SURE = 8  # looks at the norm, of which one is weak evidence
SLACK = 0.9  # a norm in 16 bits, or one that leaves out a bias, is a little shorter


@dataclass
class Streak:
    """How often something was looked at, how often it was good, and how often bad in a row up to now."""

    looks: int = 0
    good: int = 0
    row: int = 0

    def see(self, bad: bool) -> None:
        self.looks += 1
        self.good += not bad
        self.row = self.row + 1 if bad else 0

    @property
    def lasts(self) -> bool:
        """Bad from the beginning on, or in the last MANY looks; what is good again is not reported."""
        return self.row >= (MANY if self.good else ENOUGH)


@dataclass
class StepCounter:
    """Counts calls of ``w.step`` and steps of the optimizer."""

    calls: int = 0
    steps: int = 0  # of the optimizer, that began
    since: int = 0  # calls since the last
    most: int = 1  # calls between two
    began: bool = False
    ended: bool = False  # the loop was left, and nothing had been raised
    gradients: int = 0  # looks with a gradient
    lost: int = 0  # looks without one that was there at w.step
    _had_gradient: bool = False
    _first: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def call(self, model: nn.Module, optimizer: torch.optim.Optimizer, due: bool) -> None:
        self.calls += 1
        self.since += 1
        if self.steps:
            self._first = []
        elif self.calls == 1:
            self._first = sampled(model, optimizer)
        if due and not self.gradients:
            small = sorted((p.grad for p in model.parameters() if p.grad is not None), key=Tensor.numel)
            self._had_gradient = any(map(_any, small[:FEW]))

    def begin(self) -> None:
        """The optimizer is about to step."""
        self.steps += 1
        self.most, self.since = max(self.most, self.since), 0

    def look(self, gradients: bool) -> None:
        """The step that begins is looked at, with or without gradients."""
        self.gradients += gradients
        self.lost += self._had_gradient and not gradients
        self._had_gradient = False

    def findings(self, updates: int, looks: int) -> Iterator[Finding]:
        if self.calls and not self.steps:
            yield self._stepping()
        elif self.steps and not updates:
            yield Finding(
                "GL", "the optimizer's steps", f"{self.steps} began, none ended", "each ends",
                "fails" if self.ended and self.steps >= MANY else "not applicable",
                "Of several optimizers the first one steps and the last one never does.",
            )  # fmt: skip
        elif self.since >= MANY * self.most:
            yield Finding(
                "GL", "the optimizer's steps",
                f"none in the last {self.since} of {self.calls} calls of w.step, {self.most} or fewer a step before",
                f"fewer than {MANY * self.most} calls", "not declared",
                "The optimizer that is watched steps no longer. If another one has taken its place, its updates are "
                "not checked: watch it too.",
            )  # fmt: skip
        elif looks and not self.gradients:
            sure = self.lost == looks >= ENOUGH
            yield Finding(
                "GL", "gradients at the optimizer's step",
                f"none in {looks} looks; there at w.step in {self.lost}" if self.lost else f"none in {looks} looks",
                "some", "fails" if sure else "not applicable",
                "Gradients are there at w.step and gone when the optimizer steps: zero_grad is called between backward "
                "and step." if sure else "Nothing was trained in these looks: there was no gradient, or it was 0.",
            )  # fmt: skip

    def _stepping(self) -> Finding:
        moved = any(p.numel() and not torch.equal(entries(p), old) for p, old in self._first)
        sure = self.ended and self.calls >= (ENOUGH if moved else MANY)
        sure = sure or (self.began and moved and self.calls >= MANY)
        why = (
            "The watch was never begun: its loop stands inside `with watch(model, optimizer) as w:`."
            if not self.began
            else "The parameters move all the same: something else steps them. Give watch the optimizer that steps, or "
            "all of them as a list."
            if moved
            else "The parameters stay constant too: optimizer.step() is never reached, another model's is called, or a "
            "scaler skips every step. (Of an accumulation that has not come to its step yet, more calls decide.)"
        )
        return Finding(
            "GL", "the optimizer's steps", f"{self.calls} calls of w.step, no step of the optimizer was seen", "≥ 1",
            "fails" if sure else "not applicable", why,
        )  # fmt: skip


@dataclass
class Mode:
    """Training mode, of a model in which it changes something. An update counts as "on" where it was on at any moment
    that the watch was called: an evaluation in the middle of a step goes back before the next."""

    may_leave: bool = False
    off: Streak = field(default_factory=Streak)  # by update
    _on: bool = False
    _drops: Sequence[nn.Module] = ()
    _norms: Sequence[nn.Module] = ()

    def see(self, model: nn.Module) -> None:
        if not self.off.looks:
            every, norm = list(model.modules()), nn.modules.batchnorm._BatchNorm
            self._drops = [m for m in every if isinstance(m, nn.modules.dropout._DropoutNd)]
            self._norms = [m for m in every if isinstance(m, norm) and m.track_running_stats]
        self._on = self._on or model.training or any(m.training for m in (*self._drops, *self._norms))

    def update(self, model: nn.Module) -> None:
        """An update has been made."""
        self.see(model)
        self.off.see(not self._on)
        self._on = False

    def findings(self, ended: bool) -> Iterator[Finding]:
        drops = [m for m in self._drops if getattr(m, "p", 0.0) > 0]
        few = self.off.row < (ENOUGH if ended else MANY)  # during a run it may still be undone
        if few or self.may_leave or not (drops or self._norms):
            return
        many, kind = (len(drops), "dropout") if drops else (len(self._norms), "batch norm")
        what = f"{many} {kind}{'s' * (many != 1)}"
        lost, never = bool(self.off.good and drops), bool(not self.off.good and drops)
        yield Finding(
            "GL", "training mode",
            f"off in the last {self.off.row} updates, on in {self.off.good} before: {what}" if self.off.good
            else f"off in all {self.off.row} updates: {what}",
            "on", "fails" if lost else "warns" if never else "not declared",
            "The model was in training mode and is not any more: an evaluation called model.eval(), without "
            "model.train() after it. Where that is meant: watch(…, may_eval=True)." if lost
            else "The model was never in training mode: from_pretrained returns a model in eval mode, and "
            "model.train() is missing. Where it is meant to train without dropout: watch(…, may_eval=True)." if never
            else "This freezes the batch norms. Where that is meant: watch(…, may_eval=True).",
        )  # fmt: skip


@dataclass
class Cleared:
    """Between two updates ``.grad`` has to be empty once when a backward arrives. One small parameter is observed, by a
    hook that is removed at the next update.

    Two optimizers that take turns clear at the start of their turns, when the other's backward has been through: so any
    backward counts, not only the first.
    """

    dirty: Streak = field(default_factory=Streak)
    _handle: Any = None
    _fired: bool = False
    _clean: bool = False

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped."""
        self.stop()
        full = [p for p in parameters_of(optimizer) if p.requires_grad and p.grad is not None]
        first = next((p for p in sorted(full, key=Tensor.numel) if _any(p.grad)), None)
        if first is not None:
            self._handle = first.register_hook(lambda _: self._arrives(first))
        elif full:  # cleared inside the step, or by a hook of it
            self._fired = self._clean = True

    def _arrives(self, p: Tensor) -> None:
        self._fired = True
        self._clean |= not _any(p.grad)

    def end(self) -> None:
        """The optimizer is about to step again."""
        if self._fired:
            self.dirty.see(not self._clean)
        self.stop()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._fired, self._clean = None, False, False

    def findings(self) -> Iterator[Finding]:
        if self.dirty.looks >= ENOUGH:
            yield judged(
                "SE", "gradients between two updates",
                f"left in place in the last {self.dirty.row} of {self.dirty.looks} looks",
                f"cleared, fewer than {ENOUGH} looks in a row", self.dirty.row < ENOUGH,
                "Every backward adds to the gradient of the updates before: zero_grad is missing, or clears another "
                "model's.",
            )  # fmt: skip


def _any(grad: Tensor | None) -> bool:
    return grad is not None and bool((values(grad) != 0).any())


@dataclass
class Norm:
    """A logged ``grad_norm`` is the whole norm, before a clip or after it: never below the norm that the optimizer is
    given."""

    short: Streak = field(default_factory=Streak)
    ratio: float = 0.0  # the largest logged / handed where it is short
    logged: float | None = None  # of the update that is about to be made

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        logged, self.logged = self.logged, None
        # A fused optimizer may be handed a scaled gradient, and unscale it inside.
        if logged is None or not math.isfinite(logged) or getattr(optimizer, "grad_scale", None) is not None:
            return
        grads = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        handed = math.sqrt(sum(float(torch.linalg.vector_norm(values(g).float())) ** 2 for g in grads))
        if handed == 0 or not math.isfinite(handed):
            return
        self.short.see(logged < SLACK * handed)
        if logged < SLACK * handed:
            self.ratio = max(self.ratio, logged / handed)

    def findings(self) -> Iterator[Finding]:
        if self.short.looks >= SURE:
            often: Outcome = "warns" if self.short.good else False  # a mean of several updates lags behind
            yield judged(
                "MR", "grad_norm", f"below what the optimizer is given in {self.short.looks - self.short.good} of "
                f"{self.short.looks} looks, at most {self.ratio:.2g} of it", f"≥ {SLACK:g} in most looks",
                2 * self.short.good >= self.short.looks or often,
                "The norm that is logged, and perhaps clipped by, is that of a part: one rank's shard, one group, or "
                "the last micro-batch; or it is a mean of several updates whose norms rise.",
            )  # fmt: skip


@dataclass
class Rates:
    """Learning rates, by parameter: what they are, and the highest that they were or are meant to be."""

    peaks: dict[int, float] = field(default_factory=dict)
    now: dict[int, float] = field(default_factory=dict)
    zero: Streak = field(default_factory=Streak)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        self.now = {}
        for group in optimizer.param_groups:
            rate = float(group.get("lr", 1.0))
            peak = max(rate, float(group.get("initial_lr", 0.0)))
            for p in group["params"]:
                self.now[id(p)] = rate
                self.peaks[id(p)] = max(peak, self.peaks.get(id(p), 0.0))

    def count(self, gradients: bool) -> None:
        """After a look: whether there was a gradient to follow."""
        if self.now and gradients:
            self.zero.see(not any(self.now.values()))

    def full(self, p: Tensor) -> bool:
        """Whether an update is meant to be seen: at the foot of a warm-up, or the end of a decay, 16 bits legitimately
        lose it."""
        return self.now.get(id(p), 0.0) > 0 and self.now[id(p)] >= 0.5 * self.peaks[id(p)]

    def findings(self) -> Iterator[Finding]:
        if self.zero.looks >= (MANY if self.zero.good else ENOUGH):
            ever = self.zero.good > 0
            yield judged(
                "GL", "the learning rate", f"{'above' if ever else 'always'} 0 in {self.zero.looks} looks", "above 0",
                ever or ("warns" if self.zero.looks < MANY else False),
                "Every group's learning rate is 0 while gradients come: it was set to 0, or a schedule was cast to "
                f"whole numbers, or counts epochs. After {MANY} looks this fails. (A schedule that begins or ends at 0 "
                "is not an error.)",
            )  # fmt: skip


def hooked(optimizer: Any) -> Any:
    """The optimizer whose steps can be seen: accelerate's has no hooks of its own, and the one inside has."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and isinstance(
        inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = inner
    return optimizer


def owned() -> list[Tensor]:
    """The parameters of every optimizer that exists in this process."""
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    return [p for o in optimizers for p in parameters_of(o)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def at_gradients(act: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """For a hook before the optimizer's step: ``act`` when gradients are there. That is now, or, where a closure makes
    them inside the step, when it has been called for the first time; then what the step is called with instead."""
    place = len(args) > 1
    closure = args[1] if place else kwargs.get("closure")
    if closure is None:
        act()
        return None
    waiting = [act]

    def followed() -> Any:
        loss = closure()
        if waiting:
            waiting.pop()()
        return loss

    return ((args[0], followed, *args[2:]), kwargs) if place else (args, {**kwargs, "closure": followed})


def sampled(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
    """A few trainable parameters, the optimizer's own where it owns some of the model, with a part of what they are."""
    trained = [p for p in model.parameters() if p.requires_grad and p.numel() and p.layout == torch.strided]
    owned = set(map(id, parameters_of(optimizer)))
    candidates = [p for p in trained if id(p) in owned] or trained
    return [(p, entries(p).clone()) for p in candidates[:: max(1, len(candidates) // FEW)][:FEW]]


def entries(p: Tensor, rows: Tensor | None = None) -> Tensor:
    """Up to SAMPLE entries, evenly spread over all rows or these."""
    flat = (p.detach() if rows is None else p.detach()[rows]).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)]


def values(grad: Tensor) -> Tensor:
    """The entries of a gradient; of a sparse one, those that it has."""
    return (grad.coalesce().values() if grad.is_sparse else grad).detach()


def rows_of(grad: Tensor | None) -> Tensor | None:
    """The rows that a sparse gradient has; None of a dense one."""
    return grad.coalesce().indices()[0] if grad is not None and grad.is_sparse else None


@dataclass(eq=False)
class UnownedParameter:
    name: str
    key: int  # the id of the parameter
    sure: bool = False  # other parameters of its module are trained
    owned: bool = False
    looks: int = 0  # new gradients in a row after which it had not changed
    gradient: float = 0.0  # its last norm
    rows: Tensor | None = None
    value: Tensor | None = None


class UnownedParameters:
    """Finds parameters that get new gradients, belong to no optimizer, and stay constant."""

    def __init__(self) -> None:
        self._seen = WeakIdKeyDictionary()
        self._trained: list[UnownedParameter] = []  # those with a gradient, also of modules that are gone

    def look(self, named: Iterable[tuple[str, Tensor]], owns: Callable[[Tensor], bool], sure: bool = True) -> None:
        """Call before a step. A parameter that has changed since its last gradient is trained elsewhere."""
        for name, p in named:
            seen = self._seen.setdefault(p, UnownedParameter(name, id(p)))
            seen.sure, seen.owned = seen.sure or sure, owns(p)
            if seen.owned or not p.requires_grad:
                seen.looks = 0
                continue
            size = 0.0 if p.grad is None else float(torch.linalg.vector_norm(values(p.grad).float()))
            if size in (0.0, seen.gradient) or not math.isfinite(size):
                continue
            if not seen.gradient:
                self._trained.append(seen)
            same = seen.value is None or torch.equal(entries(p, seen.rows), seen.value)
            seen.looks = seen.looks + 1 if same else 0
            seen.gradient, seen.rows = size, rows_of(p.grad)
            seen.value = entries(p, seen.rows).clone()

    def look_again(self, owns: Callable[[Tensor], bool]) -> None:
        """At the parameters that had a gradient and no owner."""
        self.look([(s.name, p) for p, s in list(self._seen.items()) if s.gradient and not s.owned], owns, sure=False)

    def missing(self, patient: bool = True) -> tuple[list[UnownedParameter], list[UnownedParameter]]:
        """Those that ENOUGH looks are sure of, and those that MANY looks decide (``patient``): another optimizer of the
        process has them, or may have a copy of them with more digits, and may step rarely."""
        still = [s for s in self._trained if not s.owned and s.looks >= ENOUGH]
        late: list[UnownedParameter] = []
        if patient and any(s.looks < MANY for s in still):
            known = {id(p): p for p in self._seen}
            others = {id(q): q for q in owned()}
            widest = max((q.element_size() for key, q in others.items() if key not in known), default=0)
            sizes = {key: p.element_size() for key, p in known.items()}
            late = [s for s in still if s.looks < MANY and (s.key in others or sizes.get(s.key, widest) < widest)]
        return [s for s in still if s not in late], late


def unowned_text(found: Sequence[UnownedParameter]) -> str:
    return (
        f"{some([s.name for s in found])} get a gradient and no optimizer moves them: they were left out of the "
        "optimizer, were unfrozen or put in another's place after it was made, or it was made for a copy of the model. "
        "Add them to it; several optimizers are given as a list; requires_grad_(False) freezes what is meant to stay."
    )
