"""F64: The step's gradient agrees with that of a float64 copy, on confident inputs and large margins too.

Needs: a model that can be deep-copied and a loss that uses the model it is given
How: A copy of the model in float64 runs the same batch; once as it is, once with its last matrix scaled up.
Exceptions: Hugging Face models cast to fp32 inside norms and rotary embeddings: such modules are counted and reported.
A parameter's own gradient hooks act on the copy too. A random step (NEFTune) draws other numbers and is not judged.
Detects: log(sigmoid(x)), sqrt(x + 1e-8) in fp16, sums in bf16, bf16 gates
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import edits
from earnest_audit.gradient import Gradient
from earnest_audit.law import Law
from earnest_audit.probe import Probe, fresh, result_of, seeded
from earnest_audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if all(p.dtype == torch.float64 for p in probe.parameters.values()):
        yield LAW.not_applicable(step.name, "float64 already")
        return
    try:
        shadow = _shadow(step.model)
    except Exception as error:
        yield LAW.not_applicable(step.name, f"the model cannot be copied ({type(error).__name__})")
        return
    for what, sharpen in (("the batch", 1.0), ("confident outputs", 12.0)):
        if sharpen > 1 and not probe.afford(2, keep=0):
            yield LAW.not_applicable(what, "the budget is spent")
            return
        found = _compare(probe, shadow, what, sharpen)
        if found.outcome == "fails" and probe.random():
            why = "The loss differs between two seeds: in float64 other numbers are drawn."
            found = LAW.not_applicable(what, "the step is random", why)
        yield found


def exact(probe: Probe, batch: edits.Batch, settings: Sequence[Mapping[str, Any]]) -> list[Gradient] | None:
    """The gradients of a float64 copy at these settings; None where it cannot be made or run."""
    try:
        shadow = _shadow(probe.step.model)
        return [_shadow_gradient(probe, shadow, batch, knobs)[0] for knobs in settings]
    except Exception:
        return None


def _shadow(model: nn.Module) -> nn.Module:
    """A float64 copy, with the gradient hooks of parameters, which a copy does not have: they are part of the
    step."""
    shadow = copy.deepcopy(model).double()
    twins = dict(shadow.named_parameters())
    for name, p in model.named_parameters():
        for hook in (p._backward_hooks or {}).values():
            twins[name].register_hook(hook)
    return shadow


def _compare(probe: Probe, shadow: nn.Module, what: str, sharpen: float) -> Finding:
    step = probe.step
    head, twin = _head(step.model), _head(shadow)
    # Given log-probs belong to the policy as it was: beside a sharpened one their ratios overflow, legitimately.
    given = [role for role in ("behaviour", "proximal", "reference") if role in step.roles]
    if sharpen != 1.0 and (head is None or twin is None or given):
        why = f"the {given[0]}'s log-probs belong to the policy as it is" if given else "no matrix to scale up"
        return LAW.not_applicable(what, why)
    units = _units(step.model)
    room, own = min(0.5, units * probe.floor()), 0.0
    with probe.perturbed(), _scaled(head, sharpen), _scaled(twin, sharpen), torch.no_grad():
        lifted = dict(shadow.named_parameters())
        for name, p in probe.parameters.items():
            if sharpen == 1.0 or p is not head:
                lifted[name].copy_(p.double())
        batch = probe.off_policy()
        mine = probe.gradient(batch if sharpen == 1.0 else dict(batch))
        try:
            theirs, islands = _shadow_gradient(probe, shadow, batch)
        except Exception as error:
            return LAW.not_applicable(what, f"the shadow cannot run ({str(error)[:60]})")
        change = mine.distance(theirs)
        if room < change and mine.finite() and theirs.norm() > 0:  # a worse conditioned state? Measure, then judge.
            own = _conditioning(probe, shadow, batch, theirs)
    if theirs.norm() == 0 and mine.norm() > 0:
        return LAW.not_applicable(what, "the loss does not use the model that it is given")
    if not theirs.finite():
        return LAW.not_applicable(what, "the float64 shadow is not finite either")
    if 8 * own > 0.5:
        why = f"one unit in the last place of the weights moves the float64 gradient itself by {own:.2g}"
        return LAW.not_applicable(what, why)
    room = min(0.5, max(room, units * own))
    return LAW.finding(
        what,
        f"float64 differs by {change:.2g}" + (f" ({islands} modules stay in fp32)" if islands else ""),
        f"≤ {room:.1g}",
        change <= room,
        "The step loses its gradient to rounding: log(sigmoid(x)) or log(1 - p) far out, an eps that is 0 in this "
        "dtype, a sum in 16 bits. Accumulate in fp32 and use the stable form (logsigmoid, log1mexp, logsumexp).",
    )


def _units(model: nn.Module) -> float:
    """How many units of the step's own resolution rounding may come to, far below a wrong formula. Errors of n
    operations add up like √n: 64 for a shallow model, 300 for one of thirty layers."""
    leaves = sum(1 for module in model.modules() if not any(True for _ in module.children()))
    return 64 * max(1.0, (leaves / 16) ** 0.5)


def _shadow_gradient(
    probe: Probe, shadow: nn.Module, batch: edits.Batch, knobs: Mapping[str, Any] | None = None
) -> tuple[Gradient, int]:
    step = probe.step
    lifted = edits.lifted(fresh(batch), torch.float64)
    islands: set[str] = set()
    hooks = [m.register_forward_hook(_watch(n, islands)) for n, m in shadow.named_modules()]
    try:
        with seeded(step.seed), torch.enable_grad():
            probe.cost += 1
            result = step.loss(shadow, lifted, **probe.settings(knobs))
            own = dict(shadow.named_parameters())
            found = probe.differentiate(result_of(result)[0], [own[n] for n in probe.parameters])
    finally:
        for hook in hooks:
            hook.remove()
    return Gradient(dict(zip(probe.parameters, found, strict=True))), len(islands)


def _conditioning(probe: Probe, shadow: nn.Module, batch: edits.Batch, exact: Gradient) -> float:
    """How far the exact gradient moves when every weight, a frozen one too, does by a unit in the model's own last
    place: the effect that rounding alone may have on a correct step."""
    rng = torch.Generator().manual_seed(probe.step.seed + 23)
    kept = [p.detach().clone() for p in shadow.parameters()]
    with torch.no_grad():
        for p in shadow.parameters():
            sign = torch.randn(p.shape, generator=rng).sign().to(p.device, p.dtype)
            p.addcmul_(p.abs(), sign, value=probe.coarsest)
    try:
        return exact.distance(_shadow_gradient(probe, shadow, batch)[0])
    finally:
        with torch.no_grad():
            for p, old in zip(shadow.parameters(), kept, strict=True):
                p.copy_(old)


def _watch(name: str, islands: set[str]) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.dtype != torch.float64:
            islands.add(name)

    return hook


def _head(model: nn.Module) -> Tensor | None:
    """The last weight matrix: what makes outputs confident when it is scaled up."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return matrices[-1] if matrices else None


class _scaled:
    """Multiply a tensor in place and put its bits back."""

    def __init__(self, tensor: Tensor | None, factor: float) -> None:
        self.tensor, self.factor = tensor, factor

    def __enter__(self) -> None:
        if self.tensor is not None and self.factor != 1.0:
            self.kept = self.tensor.detach().clone()
            with torch.no_grad():
                self.tensor.mul_(self.factor)

    def __exit__(self, *_: object) -> None:
        if self.tensor is not None and self.factor != 1.0:
            with torch.no_grad():
                self.tensor.copy_(self.kept)


LAW = Law.of("F64", "float64 shadow", __doc__, check, quick=False)
