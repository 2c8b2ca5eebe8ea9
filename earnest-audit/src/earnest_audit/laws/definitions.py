"""MR-FORM: A KL or a ratio is one of the quantities that its name may mean, and an entropy term is not the mean of the
sampled tokens' -log π.

k1, k2, k3, |·|, their opposites; plain or weighed by the ratio; mean over tokens or rows, or sum
-log π of the sampled tokens   estimates the entropy, and its expected gradient is 0

Needs: a metric of the kind ratio or kl, or a term of the kind entropy; roles behaviour and reference; logprobs=fn
How: The usual definitions are computed from the log-probs; an entropy's far away, where sampled tokens are unlikely.
Exceptions: There are many definitions, and a right metric may be none of the usual ones. An entropy may be the sampled
tokens' where it is a reward, or where its gradient is weighed by itself. Steps that drop tokens are not checked.
Detects: slime #2114 (half of a KL), a KL whose mask, sign or normaliser is off, an entropy bonus that is noise
"""

from __future__ import annotations

from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.limits import ROUNDED
from earnest_audit.probe import Probe

ESTIMATED = {"ratio", "kl to the sampler", "kl to the reference"}


def check(probe: Probe) -> Rows:
    for name, m in probe.metrics.items():
        of_term = m.kind == "entropy" and name in probe.step.weights
        if not (m.average and (of_term or m.kind in ESTIMATED)):
            continue
        with probe.perturbed(1.0 if of_term else 0.05):
            value, known = probe.look(probe.off_policy()).metrics[name], _known(probe, m.kind)
        off, near = min(((abs(k - value) / max(abs(k), 1e-2), k) for k in known), default=(0.0, value))
        if of_term:
            yield LAW.finding(
                f"term {name} and the sampled tokens", f"{value:.5g}, the mean of -log π is {near:.5g}", "another",
                off > max(ROUNDED, probe.coarsest), f"{name} is the mean of -log π of the sampled tokens. It estimates "
                "the entropy, but its expected gradient is 0: the bonus is noise. Use -Σ π log π over the vocabulary.",
            )  # fmt: skip
        elif known:
            yield LAW.finding(
                f"metric {name}, recomputed", f"{value:.4g}, the nearest definition gives {near:.4g}", "one of them",
                off <= max(ROUNDED, 4 * probe.tolerance), f"{name} is none of the usual estimates (k1, k2, k3; mean of "
                "tokens or rows): a mask, a sign or a normaliser is off.",
            )  # fmt: skip


def _known(probe: Probe, kind: str | None) -> list[float]:
    """What a metric of this kind may be on the off-policy batch: a ratio per token or per row; a KL from the policy as
    it is or as it sampled, plain or weighed by the ratio; for an entropy, the mean that it must not be."""
    step, batch, now = probe.step, probe.off_policy(), probe.now().double()
    mask = edits.taken(step, now, batch)
    old = [batch[step.roles[r]].double().reshape(now.shape) for r in edits.SAMPLERS if r in step.roles]
    if kind == "entropy":
        forms = [-now]
    elif kind == "ratio":
        rows = [((now - o) * mask).sum(-1, keepdim=True).expand_as(now) for o in old]
        logs = [*(now - o for o in old), *rows, *(r / mask.sum(-1, keepdim=True).clamp(min=1) for r in rows)]
        forms = [log.exp() for log in logs]
    else:
        gaps = [now - o for o in old]
        if kind == "kl to the reference":
            there = batch.get(step.roles.get("reference", ""), now.new_zeros(0))
            gaps = [here - there.reshape(now.shape) for here in (now, *old)] if there.numel() == now.numel() else []
        plain = [f for g in gaps for f in (g, -g, g.abs(), g.square(), g.square() / 2, g.expm1() - g, (-g).expm1() + g)]
        forms = plain + [(now - o).exp() * f for o in old for f in plain]
    return [mean for form in forms for mean in _means(form, mask)]


def _means(values: Tensor, mask: Tensor) -> list[float]:
    rows = mask.sum(-1) > 0
    whole, by_row = (values * mask).sum(), (values * mask).sum(-1)[rows] / mask.sum(-1)[rows]
    return [float(v) for v in (whole / mask.sum(), by_row.mean(), whole, whole / rows.sum())]


LAW = Law(
    "MR-FORM", "definitions", __doc__, check, tier="contrib", quick=False,
    when=lambda step: step.kind == "policy gradient" and step.logprobs is not None and not step.drops_tokens,
)  # fmt: skip
