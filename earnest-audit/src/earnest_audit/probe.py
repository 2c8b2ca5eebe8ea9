"""Measures a step for the laws and judges what is measured: against its own noise and rounding, within a budget.

Most rows are judged by one of six expectations:

    matters    the gradient changes: any bit of it, or more than the noise of a step that is not deterministic
    same       it stays, within the step's own tolerance
    scales     it is a multiple c of what it was, low ≤ c ≤ high
    vanishes   it is 0, against its usual size
    descends   a number has the right sign
    agrees     two computations give the same, up to a stated limit (``law.Reporter.agrees``)

Other rows have a list that has to be empty (``Reporter.none``), or a number within a limit of the law's own.

While a probe is open, dropout is off and the hooks of the optimizer's step are disabled. When it closes, everything but
what a loss keeps in a closure of its own is bit for bit what it was (``restore.restored``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from earnest_audit import edits, restore
from earnest_audit.facts import Metric
from earnest_audit.gradient import Gradient
from earnest_audit.law import Ends, Law
from earnest_audit.measure import Measure
from earnest_audit.precision import COARSE, coarsest, noticing
from earnest_audit.restore import buffers, calling, not_restored, perturbation_sizes, replaced, without_dropout
from earnest_audit.step import FUNCTIONS, Step, StepError
from earnest_audit.verdict import Finding

LOOSE = 0.1  # a tolerance that the verdict names: the step rounds, or has a threshold, inside
COMPARED = {"logprobs": (*edits.SAMPLERS, "reference", "advantages"), "student": ("teacher",)}
"""Declared functions, with the roles that have as many numbers as each of them gives."""
Change = tuple[float, str]  # a relative change of the gradient, and how it was made
Describe = Callable[[Step, Iterable[str]], Mapping[str, Metric]]  # the facts of declared and returned metrics


class Probe(Measure):
    """A step under audit. ``law`` is the one that is being checked; the executor sets it."""

    law: Law

    def __init__(self, step: Step, describe: Describe | None = None) -> None:
        super().__init__(step)
        self.notes: tuple[str, ...] = ()
        self._describe = describe or (lambda step, _: step.facts)
        self.dropout: list[tuple[dict[str, Any], str, float]] = []  # of the model, switched off while the audit runs

    @cached_property
    def metrics(self) -> Mapping[str, Metric]:
        """What is declared or guessed of each metric."""
        return self._describe(self.step, self.look().metrics)

    # --- the expectations ---------------------------------------------------------------------------------------------

    def matters(self, subject: str, changes: Iterable[Change], meaning: str) -> Finding:
        """Edits from mild to strong: the first one that changes the gradient, or else the last one, is reported."""
        found: Change = (0.0, "")
        for found in changes:
            if self.is_change(found[0]):
                break
        expected = "above the step's noise" if self.noise else "above 0"
        measured = f"changing it moved the gradient by {found[0]:.2g}{found[1]}"
        return self.law.finding(subject, measured, expected, self.is_change(found[0]), meaning)

    def is_change(self, change: float) -> bool:
        return change > 4 * self.noise

    def same(self, subject: str, change: float, meaning: str, *, rows: bool = False, room: float | None = None,
             what: str = "moved the gradient by {}") -> Finding:  # fmt: skip
        """``rows``: the edit reorders or resizes rows, so a random step is not judged."""
        found = self.law.agrees(subject, change, self.tolerance if room is None else room, meaning, what)
        return self.fair(found) if rows else found

    def scales(self, found: Gradient, whole: Gradient, low: float, high: float) -> tuple[float, float, bool]:
        """The factor c, what is left of ``found`` - c·``whole``, and whether both are as expected."""
        factor = found.best_scale(whole)
        rest = found.distance(whole.times(factor))
        return factor, rest, rest <= self.tolerance and low <= factor <= high

    def vanishes(self, subject: str, left: float, meaning: str, least: float = 0.0) -> Finding:
        """``left`` of the usual gradient. ``least``: of the tolerance."""
        room, measured = max(least, self.tolerance), f"gradient {left:.2g} of the usual"
        return self.law.finding(subject, measured, f"0, up to {room:.2g}", left <= room, meaning)

    def descends(self, subject: str, measured: str, value: float, meaning: str, above: float = 0.0) -> Finding:
        return self.law.finding(subject, measured, f"above {above:g}", value > above, meaning)

    def tried(self, parts: Mapping[str, Iterable[Finding]]) -> Iterator[Finding]:
        """The rows of each part; where one raises, a row for the error, and the next part."""
        for subject, part in parts.items():
            try:
                yield from part
            except Ends as last:
                yield last.row
            except Exception as error:
                yield self.law.unchecked(subject, error)

    @contextmanager
    def may_refuse(self, subject: str, what: str = "cannot be run") -> Iterator[None]:
        """Inside is an edit that the step may refuse: that ends the law, or this part of it, with a row for it."""
        try:
            yield
        except Ends:
            raise
        except Exception as error:
            raise Ends(self.law.refused(subject, error, what)) from error

    def guessed(self, subject: str, readings: Iterable[Callable[[], Finding]], declare: str) -> Finding:
        """The row of the first reading. Where that fails and another one holds, only a declaration can decide."""
        failed: Finding | None = None
        refused: Exception | None = None
        for number, reading in enumerate(readings):
            try:
                found = reading()
            except Exception as error:
                refused = refused or error
                continue
            if found.outcome != "fails":
                return found if number == 0 else self.law.not_declared(subject, declare)
            failed = failed or found
        return failed or self.law.refused(subject, refused or ValueError("no tensor has the rows' width"))

    def fair(self, finding: Finding) -> Finding:
        """For edits that reorder or resize rows: a failure of a random step is not judged."""
        return self.redrawn(finding.subject) if finding.outcome == "fails" and self.random else finding

    def redrawn(self, subject: str) -> Finding:
        why = "The loss differs between two seeds: edited rows, or a copy, get other draws."
        return self.law.not_applicable(subject, "the step is random", why)

    # --- resolution ---------------------------------------------------------------------------------------------------

    @cached_property
    def noise(self) -> float:
        """Relative change of the gradient when nothing at all changes: 0 for a deterministic step."""
        again = self.read(dict(self.step.batch)).gradient  # a copy, so that it is really run again
        if (noise := self.gradient().distance(again)) > self.coarsest:
            self.notes += (f"the loss is not repeatable: the same call moves its gradient by {noise:.2g}",)
        return noise

    @cached_property
    def random(self) -> bool:
        """Whether the loss differs between two seeds (dropout is off): then other rows get other draws."""
        here = self.look().loss
        with replaced(self.step, {"seed": self.step.seed + 1}):
            there = self.look(dict(self.step.batch)).loss
        return abs(here - there) > 4 * self.noise * max(abs(here), abs(there))

    @cached_property
    def floor(self) -> float:
        """Relative change of the gradient when every parameter moves by one unit in the last place."""
        before, least = self.gradient(), self.coarsest if self.coarse else 4 * self.coarsest
        with self.moved("nudged", lambda p, noise: p.detach().abs() * self._eps(p) * noise.sign()):
            after = self.gradient()
        return max(before.distance(after), self.noise, least)

    @property
    def coarsest(self) -> float:
        """The largest unit in the last place, of the parameters or of what the modules compute in."""
        return max(self._eps(p) for p in self.step.model.parameters() if p.is_floating_point())

    @property
    def coarse(self) -> bool:
        """bf16 or fp16: there the measured floor is used, since a multiple of eps would let anything pass."""
        return self.coarsest > COARSE

    def _eps(self, p: Tensor) -> float:
        own, coarse = torch.finfo(p.dtype).eps, self.precision
        return own if coarse is None else max(own, torch.finfo(coarse).eps)

    @cached_property
    def precision(self) -> torch.dtype | None:
        """What its modules compute in, as declared or measured, where that is coarser than their parameters."""
        if self.step.precision is not None:
            return self.step.precision
        with noticing(self.step.model) as seen:
            if self._key(self.step.batch, None) in self._kept:  # a kept reading would not run the modules
                self.look(dict(self.step.batch))
            else:
                self.read()
        if (found := coarsest(seen)) is not None:
            name = str(found).removeprefix("torch.")
            self.notes += (f"its modules compute in {name}, and the tolerances are those of {name}",)
        return found

    @cached_property
    def tolerance(self) -> float:
        """What two gradients that ought to be equal may differ by, relatively."""
        room = min(0.5, (8 if self.coarse else 16) * self.floor)
        if room > LOOSE and not self.coarse:
            why = f"one unit in the last place of the parameters moves the gradient by {self.floor:.2g}"
            self.notes += (f"{why}: gradients count as equal up to {room:.2g}",)
        return room

    @property
    def value_room(self) -> float:
        """What two values of the loss that ought to be equal may differ by, relatively: less than gradients."""
        return min(self.tolerance, (1 if self.coarse else 16) * self.coarsest)

    # --- moving the policy --------------------------------------------------------------------------------------------

    @contextmanager
    def moved(self, state: str, by: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Inside, the trainable parameters are moved (``restore.moved``). The same state is the same bits."""
        now = {"_state": f"{self._state}, {state}"}
        with replaced(self, now), restore.moved(self.parameters.values(), by, self.step.seed + 17):
            yield

    @contextmanager
    def perturbed(self, size: float = 0.05) -> Iterator[None]:
        """Away from symmetric and zero states: every parameter gets noise of ``size`` times its (or a typical) rms."""
        sizes = iter(perturbation_sizes(self.parameters.values(), size))
        with self.moved(f"perturbed by {size}", lambda _, noise: next(sizes) * noise):
            yield

    def opposite(self) -> AbstractContextManager[None]:
        """Every trainable parameter has the other sign."""
        return self.moved("reversed", lambda p, _: -2 * p.detach().float())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, every term is active that ``step.active`` can activate."""
        step, active = self.step, self.step.active
        if active is None or "active" in self._state:
            yield
            return
        changed = {n: replace(step.declared[n], value=v) for n, v in active.settings.items()}
        now = {"step": replace(step, settings={**step.settings, **changed}), "_state": f"{self._state}, active"}
        with replaced(self, now), self.perturbed(active.perturb) if active.perturb else nullcontext():
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, parameters may change; readings made there are not kept."""
        now = {"_state": "in training", "_kept": dict(self._kept), "_made": dict(self._made)}
        with replaced(self, now), self._restored():
            yield

    def _restored(self) -> AbstractContextManager[None]:
        return restore.restored(self.step.model, self.step.optimizer, own_update=self.step.update is not None)

    # --- the batches of these states ----------------------------------------------------------------------------------

    @cached_property
    def quiet(self) -> dict[str, Any]:
        """Every declared term's weight at 0; nothing where the weight of the whole loss is one of them."""
        off = self.step.terms_off
        return off if off and (self.look(None, off).loss != 0 or self.gradient(None, off).norm() > 0) else {}

    def off_policy(self) -> edits.Batch:
        """``edits.off_policy``, with behaviour log-probs around the policy's own where these are known: whole rows on
        either side of ratio 1, so that token and sequence ratios leave their clips both ways."""
        return self.kept("off-policy", self._off_policy)

    def _off_policy(self) -> edits.Batch:
        step, batch = self.step, edits.off_policy(self.step)
        if step.logprobs is None or step.ratio_role not in step.roles:
            return batch
        key = step.roles[step.ratio_role]
        now, rng = self.as_policy(batch, (step.ratio_role,))[key], edits.generator(step, 9)
        rows = torch.arange(len(now), device=now.device, dtype=now.dtype)
        side = torch.where(rows % 2 == 0, 1.0, -1.0) * 0.4 * 0.1 ** (3 * rows / max(len(now), 2))
        spread = 10 ** (edits.noise_like(now, rng).clamp(-2, 0.5) - 0.3)  # from ratios of almost 1 to some of 5
        taken, wander = edits.taken(step, now, batch), spread * edits.noise_like(now, rng)
        if now.ndim == 2:  # a row's own mean stays at its side of ratio 1, however near that is
            wander = wander - (wander * taken).sum(-1, keepdim=True) / taken.sum(-1, keepdim=True).clamp(min=1)
        moved = (now + side.reshape(-1, *[1] * (now.ndim - 1)) + wander).clamp(max=-1e-3)
        batch[key] = torch.where(taken.bool(), moved, batch[key])
        return batch

    def as_policy(self, batch: Mapping[str, Any], roles: tuple[str, ...] = edits.SAMPLERS) -> edits.Batch:
        """The batch in which these roles are the policy's own log-probs."""
        keys = [self.step.roles[r] for r in roles if r in self.step.roles]
        return {**batch, **{k: self.now().to(batch[k].dtype).reshape(batch[k].shape) for k in keys}}

    # --- what it may cost, and a copy ---------------------------------------------------------------------------------

    @property
    def budget(self) -> float:
        """The most that a full audit costs, in step times: 20, and 2 for every declaration."""
        step = self.step
        functions = [name for name in FUNCTIONS if getattr(step, name) is not None]
        declared = (step.roles, step.masks, step.knobs, *step.options.values(), step.metrics, step.paths, functions)
        return 20 + 2 * sum(map(len, declared))

    def afford(self, more: float, keep: float = 4.0) -> bool:
        """Whether ``more`` step times can be spent on a closer look, and ``keep`` are left for later laws."""
        return self.cost + more + keep <= self.budget

    def twin(self) -> Probe:
        """The same step on a copy of its model as it is now, in float64, with the gradient hooks of its parameters."""
        model = copy.deepcopy(self.step.model).double()
        copies = dict(model.named_parameters())
        for name, p in self.step.model.named_parameters():
            for hook in (p._backward_hooks or {}).values():
                copies[name].register_hook(hook)
        without: dict[str, Any] = dict.fromkeys(("precision", "optimizer", "clipped", "backward", "update"))
        return Probe(replace(self.step, model=model, batch=edits.lifted(self.step.batch), **without))

    # --- the whole audit ----------------------------------------------------------------------------------------------

    @contextmanager
    def open(self) -> Iterator[Probe]:
        """The whole audit runs inside; on the way out everything is restored."""
        self.step.check_call()
        with self._restored(), without_dropout(self.step.model) as self.dropout:
            if self.dropout:
                self.notes = (f"dropout was switched off for the audit ({len(self.dropout)} rates above 0)",)
            if once := not_restored(self.step.model):
                self.notes += (f"what the audit read of {', '.join(once)} was not restored: it can be read only once",)
            self._put_buffers_back = buffers(self.step.model)
            self._sums = self._sum()
            if self.step.backward is None:  # or else when a law compares gradients: the run's own pass needs less
                _ = self.precision
            yield self

    def try_functions(self) -> None:
        """Raise where a declared function, called once for the unchanged step, does not give what is compared with."""
        step = self.step
        given = {n: self.forward(fn, graph=False) for n in COMPARED if (fn := getattr(step, n)) is not None}
        if step.reference is not None:
            with calling(step.seed, graph=False):
                given["reference"] = step.reference()
        for name, found in given.items():
            tensor = isinstance(found, Tensor)
            what = f"{name} gives a {f'tensor of shape {tuple(found.shape)}' if tensor else type(found).__name__}"
            if name == "logprobs" and (step.kind == "preference" or "chosen" in step.roles):
                several = isinstance(found, tuple | list) or (tensor and found.ndim == 2)
                sides = [side.numel() for side in found if isinstance(side, Tensor)] if several else []
                if "chosen" in step.roles and sides != [step.rows] * 2:
                    raise StepError(f"{what}: give two tensors of shape ({step.rows},), chosen and rejected.")
                if "chosen" in step.roles or (sides and not tensor):
                    continue
            if not tensor:
                raise StepError(f"{what}: give a tensor.")
            for role in (r for r in COMPARED.get(name, ()) if r in step.roles):
                # A reference and advantages may have other dimensions, one column, or one that the loss cuts off.
                key, shape = step.roles[role], step.batch[step.roles[role]].shape
                other = len(shape) != found.ndim or shape[1:] in ((1,), (found.shape[-1] + 1,))
                if shape.numel() != found.numel() and not (other and role in ("reference", "advantages")):
                    raise StepError(f"{what}, but role {role!r} ({key!r}) has {tuple(shape)}: give as many numbers.")

    def written(self) -> list[str]:
        """The trainable parameters that are not what they were when the audit began."""
        return [name for name, total in self._sum().items() if total != self._sums[name]]

    def written_again(self) -> list[str]:
        """The trainable parameters that one more call of the loss changes by more than rounding."""
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.look(dict(self.step.batch))
        return [n for n, p in self.parameters.items()
                if not torch.allclose(p.detach(), before[n], rtol=4 * torch.finfo(p.dtype).eps, atol=0)]  # fmt: skip

    def _sum(self) -> dict[str, float]:
        return {name: float(p.detach().sum(dtype=torch.float64)) for name, p in self.parameters.items()}
