"""Law GL: every term and every trainable parameter is alive, and nothing else moves.

    for every term k of the objective:        ‖w_k ∇L_k‖ > 0
    for every trainable parameter p:          ∇_p L ≠ 0 within the probe's steps, and bits(p) change within 2 steps
    for everything else:                      bits stay
    and one set is trainable, owned by the optimizer and clipped

The probe runs on the engine itself and puts it back, bit for bit. It would have seen a distillation term that is always
0, an adapter slot that is reused with A = B = 0, a bf16 parameter whose update rounds away, a base weight that trains
along. What must not raise an alarm: a parameter without a gradient at birth by design (LoRA's A while B = 0) may get it
at step 2, and a term that sleeps by design (a barrier below its τ, a KL at its reference) is woken first.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from earnest.audit.awake import Awake, awake
from earnest.audit.restore import remember
from earnest.audit.verdict import Finding, Verdict, collect
from earnest.engines.local import LocalEngine
from earnest.objectives.base import Objective, Term
from earnest.signals.batch import Batch

STEPS = 2
NO_PATH = "No path leads from them to the loss (detached, bypassed, or 0 · 0)."
NO_UPDATE = "Their update is 0 or rounds away (16-bit storage), or no optimizer owns them."
NO_RATE = "The learning rate is 0."


def prove_alive(
    engine: LocalEngine, objective: Objective | Term, batch: Batch, *, progress: Callable[[str], None] | None = None
) -> Verdict:
    """Check this training step on this batch; the engine is bit-equal afterwards."""
    objective = Objective.of(objective)
    say = progress or (lambda _: None)
    findings: list[Finding] = []
    with restored(engine):
        say("terms")
        findings.append(_sets(engine))
        with awake(engine, objective, batch) as woken:
            findings += _terms(engine, woken, batch)
            alone = len(woken.how) == len(list(objective.live()))
            if alone:  # nothing else trains: the parameters are looked at where something does
                say("parameters")
                findings += _parameters(engine, woken.objective, batch)
        if not alone:
            say("parameters")
            findings += _parameters(engine, objective, batch)
    return collect(findings)


@contextmanager
def restored(engine: LocalEngine) -> Iterator[None]:
    """Put the parameters, optimizer, version and states of the engine back as they were, whatever happens inside.

    Hooks on the optimizer's step do run here: that one of them moves what is frozen is what the law looks for.
    """
    parameters = [p.detach().clone() for p in engine.parameters]
    gradients = [p.grad for p in engine.parameters]
    optimizer = remember(engine.optimizer)
    version, state = engine.version, copy.deepcopy(engine.objective_state)
    guard, outer = engine.guard, engine.outer
    held = {k: v.clone() for k, v in guard.state_dict().items()} if guard else {}
    engine.outer = None  # a probe never reaches other replicas
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value, grad in zip(engine.parameters, parameters, gradients, strict=True):
                p.copy_(value)
                p.grad = grad
        optimizer()
        engine.version, engine.objective_state, engine.outer = version, state, outer
        if guard:
            guard.load_state_dict(held)


def _terms(engine: LocalEngine, woken: Awake, batch: Batch) -> Iterator[Finding]:
    objective = woken.objective
    for label, (norm, share) in engine.gradient_shares(batch, objective).items():
        asleep = f" (asleep at first; this is {woken.how[label]})" if label in woken.how else ""
        yield Finding(
            law="GL",
            subject=f"term {label}",
            measured=f"gradient norm {norm:.3g}, {share:.0%} of the sum{asleep}",
            expected="above 0",
            outcome="holds" if norm > 0 else "fails",
            meaning=f"The term {label} adds nothing to the gradient: it trains nothing. Look at its signal (all "
            "advantages 0? a mask?), at a detach, and at its threshold.",
        )
    for label in objective.skipped:
        yield Finding("GL", f"term {label}", "weight 0", "computed", "not applicable", "Weight 0: not computed.")


def _sets(engine: LocalEngine) -> Finding:
    """``engine.parameters`` is what the engine clips and hands to its guard."""
    clipped = {id(p) for p in engine.parameters}
    owned = [id(p) for group in engine.optimizer.param_groups for p in group["params"]]
    trainable = {id(p) for p in engine.policy.model.parameters() if p.requires_grad}
    holds = clipped == set(owned) == trainable and len(owned) == len(set(owned))
    return Finding(
        "GL",
        "trainable, owned and clipped",
        f"{len(trainable)}, {len(owned)} and {len(clipped)} parameters",
        "one set",
        "holds" if holds else "fails",
        "" if holds else "The optimizer or the clip was made for other parameters than the trainable ones.",
    )


def _parameters(engine: LocalEngine, objective: Objective, batch: Batch) -> Iterator[Finding]:
    before = [_hash(p) for p in engine.parameters]
    frozen = {name: _hash(p) for name, p in _others(engine)}
    lively = [False] * len(engine.parameters)
    judged: list[Mapping[str, float]] = []
    for _ in range(STEPS):
        for i, grad in enumerate(engine.gradients(batch, objective).values()):
            lively[i] |= bool(grad.any())
        judged.append(engine.step(batch, objective).update.guard)
    rate = engine.learning_rate
    if rate == 0:
        yield Finding(
            "GL", "learning rate", "0", "above 0", "fails",
            "The learning rate is 0: no parameter moves, and one that waits for another to move gets no gradient.",
        )  # fmt: skip
    names = dict(zip(engine.names, zip(engine.parameters, before, lively, strict=True), strict=True))
    dead = [n for n, (_, _, alive) in names.items() if not alive]
    still = [n for n, (p, was, _) in names.items() if _hash(p) == was]
    total = len(names)
    yield Finding(
        "GL",
        f"{total} trainable parameters",
        f"{total - len(dead)} got a gradient",
        f"all {total} within {STEPS} steps",
        "fails" if dead or not total else "holds",
        f"Without a gradient: {_some(dead)}. " + (NO_RATE if rate == 0 else NO_PATH) if dead else "",
    )
    yield Finding(
        "GL",
        f"{total} trainable parameters",
        f"{total - len(still)} changed their bits",
        f"all {total} within {STEPS} steps",
        "fails" if still or not total else "holds",
        f"Unmoved: {_some(still)}. " + (NO_RATE if rate == 0 else NO_UPDATE) if still else "",
    )
    if engine.guard is not None and all("removed" in found for found in judged):
        most = max(found["removed"] for found in judged)
        yield Finding(
            "GL",
            f"guard {type(engine.guard).__name__}",
            f"takes {most:.2g} of an update's length",
            f"above 0 within {STEPS} steps",
            "holds" if most > 0 else "fails",
            "The guard finds nothing to take out: its directions meet no update (another adapter's, the wrong sign, or "
            "a batch without the unwanted). Extract them on this adapter and look at their held-out accuracy.",
        )
    moved = [name for name, p in _others(engine) if _hash(p) != frozen[name]]
    yield Finding(
        "GL",
        f"{len(frozen)} other tensors",
        f"{len(moved)} moved",
        "none",
        "fails" if moved else "holds",
        f"Moved although not trainable: {_some(moved)}. The optimizer or a hook reaches beyond the adapter."
        if moved
        else "",
    )


def _others(engine: LocalEngine) -> Iterator[tuple[str, Tensor]]:
    own = {id(p) for p in engine.parameters}
    for name, tensor in [*engine.policy.model.named_parameters(), *engine.policy.model.named_buffers()]:
        if id(tensor) not in own:
            yield name, tensor


def _hash(tensor: Tensor) -> str:
    raw = (
        tensor.detach().contiguous().cpu().view(torch.uint8)
        if tensor.ndim
        else tensor.detach().cpu().reshape(1).view(torch.uint8)
    )
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).hexdigest()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
