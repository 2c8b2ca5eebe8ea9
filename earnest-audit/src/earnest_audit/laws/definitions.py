"""MR-FORM: A KL or a ratio is one of the quantities that its name may mean, and an entropy term is not the mean of the
sampled tokens' -log π.

k1, k2, k3, |·|, their opposites; plain or weighed by the ratio; mean over tokens or rows, or sum
-log π of the sampled tokens   estimates the entropy, and its expected gradient is 0

Needs: a metric of the kind ratio, kl to the sampler or kl to the reference, or a term of the kind entropy; role
behaviour (or proximal), for the reference also that; logprobs=fn
How: The usual definitions are computed from the log-probs, and compared with what is logged near the policy; the
entropy far away, where sampled tokens are unlikely.
Exceptions: There are many definitions, and a right metric may be none of the usual ones. An entropy may be the sampled
tokens' where it is a reward, or where its gradient is weighed by itself. Steps that drop tokens are not checked.
Detects: slime #2114 (half of a KL), a KL whose mask, sign or normaliser is off, an entropy bonus that is noise
"""

from __future__ import annotations

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.limits import ROUNDED
from earnest_audit.probe import Probe


ESTIMATED = {"ratio", "kl to the sampler", "kl to the reference"}


def check(probe: Probe) -> Rows:
    step, room = probe.step, max(ROUNDED, probe.coarsest)
    kinds = {name: m.kind for name, m in probe.metrics.items() if m.average}
    named = [name for name, kind in kinds.items() if kind in ESTIMATED]
    terms = [name for name in step.weights if kinds.get(name) == "entropy"]
    if step.logprobs is None and (named or terms):
        raise Ends(LAW.not_declared("definitions of metrics", "logprobs=lambda model, batch: …"))
    with probe.perturbed():
        forms, logged = (_forms(probe), probe.look(probe.off_policy()).metrics) if named else ({}, {})
    for name in (n for n in named if n in logged and kinds[n] in forms):
        value, known = logged[name], forms[kinds[name]]
        near = min(known, key=lambda k: abs(k - value))
        yield LAW.finding(
            f"metric {name}, recomputed", f"{value:.4g}, the nearest definition gives {near:.4g}", "one of them",
            abs(value - near) <= max(room, 4 * probe.tolerance) * max(abs(near), 1e-2),
            f"{name} is none of the usual estimates (k1, k2, k3; token or sequence mean): a mask, a sign or a "
            "normaliser is off.",
        )  # fmt: skip
    with probe.perturbed(1.0):
        drawn = _means(-probe.now().double(), edits.taken(step, probe.now())) if terms else []
        logged = probe.look().metrics if terms else {}
    for name in terms:
        near = min(drawn, key=lambda k: abs(k - logged[name]))
        yield LAW.finding(
            f"term {name} and the sampled tokens", f"{logged[name]:.5g}, the mean of -log π is {near:.5g}", "another",
            abs(logged[name] - near) > room * abs(near),
            f"{name} is the mean of -log π of the sampled tokens. Its value estimates the entropy, but its expected "
            "gradient is 0, so the bonus is noise. Use -Σ π log π over the vocabulary.",
        )  # fmt: skip


def _forms(probe: Probe) -> dict[str | None, list[float]]:
    """What each kind may be on the off-policy batch: a ratio per token or per row, a KL as the policy is or as it
    sampled, also weighed by the ratio and by the term's own weight."""
    step, batch, now = probe.step, probe.off_policy(), probe.now().double()
    mask, there = edits.taken(step, now, batch), step.value("reference")
    old = [batch[step.roles[r]].double().reshape(now.shape) for r in edits.SAMPLERS if r in step.roles]
    ratios = [(now - o).exp() for o in old]
    rows = [form for r in ratios for form in _of_rows(r, mask)]
    found = {"ratio": ratios + rows, "kl to the sampler": _estimates([now - o for o in old], ratios)}
    if there is not None and there.shape == step.batch[step.roles[step.ratio_role]].shape:
        reference = batch[step.roles["reference"]].double().reshape(now.shape)
        found["kl to the reference"] = _estimates([here - reference for here in (now, *old)], ratios)
    own = {1.0, *(float(step.knobs[k]) for m, k in step.weights.items() if "kl" in str(probe.metrics[m].kind))}
    return {kind: [w * v for form in forms for v in _means(form, mask) for w in own] for kind, forms in found.items()}


def _estimates(gaps: list[Tensor], ratios: list[Tensor]) -> list[Tensor]:
    plain = [f for g in gaps for f in (g, -g, g.abs(), g.square(), g.square() / 2, g.exp() - 1 - g, (-g).exp() - 1 + g)]
    return plain + [r * f for r in ratios for f in plain]


def _of_rows(ratio: Tensor, mask: Tensor) -> list[Tensor]:
    """The product of a row's ratios, and its geometric mean, at each of its tokens."""
    logs, count = (ratio.log() * mask).sum(-1, keepdim=True), mask.sum(-1, keepdim=True).clamp(min=1)
    return [logs.exp().expand_as(ratio), (logs / count).exp().expand_as(ratio)]


def _means(values: Tensor, mask: Tensor) -> list[float]:
    rows = mask.sum(-1) > 0
    whole, by_row = (values * mask).sum(), (values * mask).sum(-1)[rows] / mask.sum(-1)[rows]
    return [float(v) for v in (whole / mask.sum(), by_row.mean(), whole, whole / rows.sum())]


LAW = Law(
    "MR-FORM", "definitions", __doc__, check, tier="contrib", quick=False,
    when=lambda step: step.kind == "policy gradient" and step.ratio_role in step.roles and not step.drops_tokens,
)  # fmt: skip
