"""GL: every trainable parameter gets a gradient and its bits change; the optimizer owns, and the clip bounds, what is
trainable; nothing else moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from earnest.audit.gradient import Gradient
from earnest.audit.law import Law, not_declared
from earnest.audit.laws.arrival import SHARE, after_warmup, arrival, coarse
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding

STEPS = 2


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    first = probe.gradient()
    norm = first.norm()
    yield LAW.finding(
        step.name,
        f"gradient norm {norm:.3g}",
        "finite and above 0",
        first.finite() and norm > 0,
        "The step trains nothing, or trains on NaN. Look for a detach, a no_grad, all-zero advantages, an all-zero "
        "mask.",
    )
    if not first.finite():
        return
    yield from _owned(probe)
    yield _clipped(probe)
    yield _unwritten(probe)
    with probe.training():
        yield from _train(probe, first)


def _owned(probe: Probe) -> Iterator[Finding]:
    optimizer = probe.step.optimizer
    if optimizer is None:
        yield not_declared("GL", "the optimizer's parameters", "optimizer=…")
        return
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    ids = {id(p) for p in owned}
    orphans = [n for n, p in probe.parameters.items() if id(p) not in ids]
    mine = {id(p) for p in probe.parameters.values()}
    frozen = sum(not p.requires_grad for p in owned)
    strangers = sum(id(p) not in mine for p in owned) - frozen
    yield LAW.finding(
        "the optimizer's parameters",
        f"{len(orphans)} trainable ones missing, {strangers} that are not the model's, {len(owned) - len(ids)} twice",
        "exactly the trainable parameters, once each",
        not orphans and strangers <= 0 and len(owned) == len(ids),
        f"The optimizer was made for another set than what is trainable: {some(orphans) or 'see the counts'}. It was "
        "built before an adapter was attached or a layer replaced, or a group was forgotten. Several optimizers "
        "are given as a list.",
    )


def _unwritten(probe: Probe) -> Finding:
    moved = probe.written()
    if moved and not probe.written_again():  # a norm that is held in place (an embedding's max_norm) settles at once
        moved = []
    return LAW.finding(
        "the weights, after one call of the loss",
        f"{len(moved)} tensors changed",
        "none: only the optimizer moves them",
        not moved,
        f"The loss writes into the weights themselves: {some(moved)}. Noise that is added in place, a clamp or a "
        "renormalisation adds up from call to call, at evaluations too.",
    )


def _clipped(probe: Probe) -> Finding:
    clipped = probe.step.clipped
    if clipped is None:
        return not_declared("GL", "the clipped parameters", "clipped=[…], what clip_grad_norm_ is given,")
    ids = {id(p) for p in clipped}
    free = [n for n, p in probe.parameters.items() if id(p) not in ids]
    mine = {id(p) for p in probe.step.model.parameters()}
    strangers = len(ids - mine)
    return LAW.finding(
        "the clipped parameters",
        f"{len(free)} trainable ones missing, {strangers} that are not the model's",
        "every trainable parameter, and the model's only",
        not free and not strangers,
        f"The gradient's norm is taken and bounded over another set than what is trained: "
        f"{some(free) or 'see the counts'}. What is left out is updated at its full length, whatever max_grad_norm is.",
    )


def _train(probe: Probe, first: Gradient) -> Iterator[Finding]:
    """A few real steps from the real state: a parameter that starts at 0 · 0 stays there, a kick would hide it."""
    step, names = probe.step, list(probe.parameters)
    before = {n: bits(p) for n, p in probe.parameters.items()}
    others = {n: bits(p) for n, p in step.model.named_parameters() if n not in before and not p.requires_grad}
    born = {n: bits(t) for n, t in step.model.named_buffers()}
    pushed: set[str] = set()
    alive = dict.fromkeys(names, False)
    for number in range(STEPS):
        gradient = first if number == 0 else probe.gradient(dict(step.batch))
        for name, g in gradient.parts.items():
            alive[name] |= g is not None and bool((g != 0).any())
        # A running statistic moves in the forward pass, lawfully; a buffer that an update moves is a frozen weight.
        buffers = {n: bits(t) for n, t in step.model.named_buffers()}
        _update(probe, gradient.parts)
        pushed |= {n for n, t in step.model.named_buffers() if buffers.get(n) != bits(t)}
    # What is added to both answers of a pair (a bias behind the last non-linearity) cancels: reached, and exactly 0.
    offset = [
        n for n, p in probe.parameters.items()
        if not alive[n] and step.kind == "preference" and p.ndim <= 1 and first.parts[n] is not None
    ]  # fmt: skip
    dead = [n for n in names if not alive[n] and n not in offset and not idles(n, step.may_idle)]
    idle = sum(not a for a in alive.values()) - len(dead) - len(offset)
    yield LAW.finding(
        f"{len(names)} trainable parameters",
        f"{len(names) - len(dead) - idle - len(offset)} got a gradient within {STEPS} steps"
        + (f", {idle} idle by declaration" if idle else "")
        + (f"; {some(offset)} cancels in every pair and trains nothing" if offset else ""),
        "all" if not step.may_idle else "all but those that may idle",
        not dead,
        f"No gradient reaches {some(dead)}. They are detached or bypassed, a layer's checkpointing cuts the graph, "
        'or two factors are both 0. Experts that get no token from one batch are declared: may_idle=("*.experts.*",).',
    )
    if step.optimizer is None:
        yield not_declared("GL", "the parameters' bits", "optimizer=…")
        return
    live = sum(alive.values())
    still = [n for n, p in probe.parameters.items() if bits(p) == before[n] and alive[n]]
    found = arrival(probe, first, still)
    if found is not None:  # what could not be written yet may be kept for later, or rounded at random
        still = [n for n in still if n not in found.moved and not (found.random and coarse(probe.parameters[n]))]
    yield LAW.finding(
        f"{len(names)} trainable parameters",
        f"{live - len(still)} changed their bits",
        f"all that got a gradient ({live})",
        not still,
        f"{some(still)} get a gradient and do not move: the optimizer does not own them, or the update is lost when "
        "it is rounded to their dtype (keep trainable parameters in fp32, or raise the learning rate).",
    )
    if found is not None and found.share is not None:
        yield LAW.finding(
            "updates in 16 bits",
            f"{found.share:.0%} of an fp32 update in {found.steps} steps of one gradient"
            + (f" ({len(found.masters)} have a master copy)" if found.masters else "")
            + (" (the update rounds at random)" if found.random else ""),
            f"≥ {SHARE:.0%}",
            found.arrives,
            "Most of every update is lost when it is rounded to the parameters' 16 bits, at this learning rate, for "
            "ever: keep trainable parameters in fp32 (or a master copy of them in the optimizer), round at random, or "
            "raise the learning rate.",
        )
    moved = [n for n, p in step.model.named_parameters() if n in others and others[n] != bits(p)] + sorted(pushed)
    running = sum(born.get(n) != bits(t) for n, t in step.model.named_buffers() if n not in pushed)
    yield LAW.finding(
        f"{len(others)} frozen parameters, {len(born)} buffers",
        f"{len(moved)} moved"
        + (f"; {running} buffers did in the forward pass, as running statistics do" * bool(running)),
        "none",
        not moved,
        f"{some(moved)} moved although frozen: the optimizer or a hook reaches further than declared.",
    )


def idles(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter is declared to get no gradient from some batches, as an expert without a token."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _update(probe: Probe, gradient: object) -> None:
    step = probe.step
    assert isinstance(gradient, dict)
    for name, p in probe.parameters.items():
        g = gradient[name]
        p.grad = None if g is None else g.clone()
    owned = [p for p in probe.parameters.values() if p.grad is not None]
    bounded = owned if step.clipped is None else [p for p in step.clipped if p.grad is not None]
    if step.max_grad_norm is not None and bounded:
        torch.nn.utils.clip_grad_norm_(bounded, step.max_grad_norm)
    if step.optimizer is not None:
        after_warmup(step.optimizer)
        step.optimizer.step()
        step.optimizer.zero_grad(set_to_none=True)
        return
    with torch.no_grad():  # without an optimizer: a small step of our own, only to leave the birth state
        for p in owned:
            assert p.grad is not None
            size = float(p.grad.float().norm())
            reach = 1e-3 * max(float(p.float().norm()), 1e-3 * p.numel() ** 0.5)
            p.sub_(p.grad * (reach / size if size > 0 else 0.0))
            p.grad = None


def bits(t: Tensor) -> bytes:
    return t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


LAW = Law(
    code="GL",
    name="liveness",
    sentence="Every trainable parameter gets a gradient, its bits change and most of an update arrives; the optimizer "
    "owns, and the clip bounds, what is trainable; nothing else moves.",
    needs="model and loss; optimizer for what moves and what it owns; clipped for what is clipped",
    how=f"{STEPS} real steps from the real state, then every bit is compared and put back. In 16 bits the update is "
    "held against what the same optimizer does to fp32 copies: half of it has to arrive.",
    traps="LoRA's A has no gradient while B = 0: it may come at step 2. Weight decay alone moves a parameter that is "
    "dead, so gradients are asked for first. Experts without a token are declared in may_idle; running statistics "
    "move in the forward pass, so of buffers only those that an update moves are asked. Master copies, Kahan's "
    "compensation and stochastic rounding arrive later, so the same gradient is handed over again where little does.",
    caught="SkyRL #852 (A = B = 0), open-unlearning #178 (checkpointing cuts the graph), bf16 gates that never move, "
    "prime-rl #1311, torchao #1124 (bf16 weights keep a tenth of their updates)",
    check=check,
)
