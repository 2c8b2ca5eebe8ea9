"""Law SH: the ranks of a mesh together compute the gradient that one rank computes from the whole batch.

rows        every active token of the batch is in the loss of exactly one rank
gradient    the sum over the ranks is the gradient that each rank computes from all rows by itself
norm        the norm that is clipped is that of this gradient
random      the ranks draw different random numbers (dropout)

With tensor parallelism a rank that computes by itself gathers the weight of each layer for its product, so the second
gradient does not depend on the exchanges within a team.

The other laws of the audit need whole parameters, so they are checked in one process. For sharded parameters, law SH
also checks that the optimizer owns each of them once, that each gets a gradient, and that each moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from zlib import crc32

import torch

from earnest.engines.local import LocalEngine
from earnest.objectives.base import Objective
from earnest.signals.batch import Batch
from earnest_audit.verdict import Finding, judged

WIDE, NARROW = 1e-3, 5e-2
"""The largest relative difference that another order of the same sums can cause, in 32 and in 16 bits."""


def check(
    engine: LocalEngine, objective: Objective, batch: Batch, reports: list[Mapping[str, float]]
) -> Iterator[Finding]:
    """Yield the findings on an engine of several ranks; the guard's report of an update is added to ``reports``. The
    caller restores the engine."""
    trained, mesh = engine.trained, engine.mesh
    room = NARROW if engine.policy.dtype.itemsize == 2 else WIDE
    parts = engine.layouts.cut(batch, engine.micro_tokens)
    own = [t for part in parts if not part.spare for t in part.token.tolist()]
    dealt = sorted(t for tokens in mesh.gathered(own) for t in tokens)
    total = batch.active.shape[0]
    why = "Some rows are computed by several ranks or by none, so the gradient is not that of the batch."
    measured = f"{len(dealt)} tokens computed, {len(set(dealt))} of {total} different ones"
    whole = dealt == list(range(total))
    yield judged("SH", "the rows of the ranks", measured, f"each of {total} once", whole, why)
    states: list[int] = []
    body = engine.policy.body
    hook = body.register_forward_pre_hook(lambda *_: states.append(crc32(torch.get_rng_state().numpy().tobytes())))
    try:
        together = engine.own_gradients(batch, objective)
    finally:
        hook.remove()
    with engine.alone():
        alone = engine.own_gradients(batch, objective)
    norms = trained.norm(together), trained.norm(alone)
    apart = trained.norm([a - b for a, b in zip(together, alone, strict=True)]) / max(*norms, 1e-30)
    why = "The ranks' gradients are not summed, are averaged, or are clipped one by one, or rows are repeated."
    measured = f"{apart:.2g} from that of one rank with all rows"
    yield judged("SH", "the gradient of the ranks", measured, f"at most {room:g}", apart <= room, why)
    streams = mesh.gathered(tuple(states))
    different = len(set(streams))
    why = "Ranks with different rows draw the same numbers, so dropout removes the same units from them."
    expected = f"{mesh.teams}" + ("" if mesh.tensor == 1 else f", one for each team of {mesh.tensor}")
    measured = f"{different} different streams on {mesh.size} ranks"
    own_stream = different == mesh.teams and len(set(streams[:: mesh.tensor])) == mesh.teams
    yield judged("SH", "the ranks' random numbers", measured, expected, own_stream, why)
    before = [p.detach().clone() for p in engine.parameters]
    for p, gradient in zip(engine.parameters, together, strict=True):
        p.grad = gradient
    engine.planned = 1.0
    update = engine.update()
    reports.append(update.guard)
    clipped = update.gradient_norm
    why = "The clip uses another norm than that of the batch's gradient, such as that of one rank."
    near = abs(clipped - norms[1]) <= room * max(clipped, norms[1])
    yield judged("SH", "the clipped norm", f"{clipped:.4g}", f"{norms[1]:.4g}, that of the whole gradient", near, why)
    if trained.any_sharded:
        owned = [id(p) for group in engine.optimizer.param_groups for p in group["params"]]
        every = [id(p) for p in engine.parameters]
        measured = f"{len(set(owned) & set(every))} of {len(every)} owned"
        why = "The optimizer was built before the weights were sharded, or a group was forgotten."
        yield judged("SH", "the optimizer's parameters", measured, "each once", sorted(owned) == sorted(every), why)
        moved = [bool((p.detach() != b).any()) for p, b in zip(engine.parameters, before, strict=True)]
        live = [bool((g != 0).any()) for g in alone]
        count = [sum(any(rank) for rank in zip(*mesh.gathered(flags), strict=True)) for flags in (live, moved)]
        measured = f"{count[0]} got a gradient, {count[1]} changed their bits"
        why = "Some parameters get no gradient, or the update does not change them."
        yield judged("SH", f"{len(every)} trainable parameters", measured, "all", min(count) == len(every), why)
