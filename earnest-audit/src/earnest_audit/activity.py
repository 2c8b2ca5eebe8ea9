"""Whether a run trains at all: steps of the watched optimizer, gradients that are present when it steps, and a
training mode that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.limits import ENOUGH, MANY, SAMPLE
from earnest_audit.verdict import Finding

FEW = 3  # parameters that are compared


def hooked(optimizer: Any) -> Any:
    """The optimizer whose steps can be seen: accelerate's has no hooks of its own, and the one inside has."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and isinstance(
        inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = inner
    return optimizer


def at_gradients(act: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """For a hook before the optimizer's step: ``act`` when gradients are there. That is now, or, where a closure makes
    them inside the step, when it has been called for the first time; then what the step is called with instead."""
    place = 1 if len(args) > 1 else None
    closure = args[1] if place else kwargs.get("closure")
    if closure is None:
        act()
        return None
    calls = 0

    def followed() -> Any:
        nonlocal calls
        loss = closure()
        calls += 1
        if calls == 1:
            act()
        return loss

    return ((args[0], followed, *args[2:]), kwargs) if place else (args, {**kwargs, "closure": followed})


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
    bare: int = 0  # looks without one that was there at w.step
    _there: bool = False
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
            self._there = any(bool(grad.count_nonzero()) for grad in small[:FEW])

    def begin(self) -> None:
        """The optimizer is about to step."""
        self.steps += 1
        self.most, self.since = max(self.most, self.since), 0

    def look(self, gradients: bool) -> None:
        """The step that begins is looked at, with or without gradients."""
        self.gradients += gradients
        self.bare += self._there and not gradients
        self._there = False

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
                "The optimizer that is watched steps no longer. Where another one has taken its place, nothing is seen "
                "of its updates: watch it too.",
            )  # fmt: skip
        elif looks and not self.gradients:
            sure = self.bare == looks >= ENOUGH
            yield Finding(
                "GL", "gradients at the optimizer's step",
                f"none in {looks} looks; there at w.step in {self.bare}" if self.bare else f"none in {looks} looks",
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


def unproved(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Of a run without an update nothing holds: what was seen of its batches was not trained on."""
    for f in findings:
        yield replace(f, outcome="not applicable") if f.outcome == "holds" else f


@dataclass
class Mode:
    """Training mode, of a model in which it changes something. An update counts as "on" where it was on at any moment
    that the watch was called: an evaluation in the middle of a step goes back before the next."""

    may_leave: bool = False
    on: int = 0  # updates
    off: int = 0  # … in a row, up to now
    _on: bool = False
    _kinds: tuple[list[nn.Module], list[nn.Module]] | None = None

    def see(self, model: nn.Module) -> None:
        if self._kinds is None:
            every = list(model.modules())
            self._kinds = (
                [m for m in every if isinstance(m, nn.modules.dropout._DropoutNd)],
                [m for m in every if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats],
            )
        self._on = self._on or model.training or any(m.training for kind in self._kinds for m in kind)

    def update(self) -> None:
        self.on += self._on
        self.off = 0 if self._on else self.off + 1
        self._on = False

    def findings(self, ended: bool) -> Iterator[Finding]:
        if self._kinds is None or self.off < (ENOUGH if ended else MANY):  # during a run it may still be undone
            return
        drops = [m for m in self._kinds[0] if getattr(m, "p", 0.0) > 0]
        if not drops and not self._kinds[1]:
            return
        what = f"{len(drops)} dropouts" if drops else f"{len(self._kinds[1])} batch norms"
        lost = bool(self.on and drops and not self.may_leave)
        yield Finding(
            "GL", "training mode",
            f"off in the last {self.off} updates, on in {self.on} before: {what}" if self.on
            else f"off in all {self.off} updates: {what}",
            "on", "fails" if lost else "not declared",
            "The model was in training mode and is so no longer: an evaluation called model.eval() and nobody called "
            "model.train() after it. Where that is meant: watch(…, may_eval=True)." if lost
            else "Whether that is meant only you know: batch norms are frozen so, and from_pretrained hands models "
            "over so.",
        )  # fmt: skip


def sampled(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
    """A few trainable parameters, the optimizer's own where it owns some of the model, with a part of what they are."""
    trained = [p for p in model.parameters() if p.requires_grad and p.numel() and p.layout == torch.strided]
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    asked = [p for p in trained if id(p) in owned] or trained
    chosen = asked[:: max(1, len(asked) // FEW)][:FEW]
    return [(p, entries(p).clone()) for p in chosen]


def entries(p: Tensor) -> Tensor:
    """Up to SAMPLE entries, evenly spread."""
    flat = p.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)]
