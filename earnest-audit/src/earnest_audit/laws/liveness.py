"""GL: Every trainable parameter and every term has a gradient; the parameters' bits change and most of each update is
applied; the optimizer owns, and the clip bounds, exactly what is trainable; nothing else moves.

Needs: model and loss; optimizer, clipped, weighed; backward and update where the run has its own
How: 2 real steps from the real state, then every bit is compared and restored. In 16 bits at least half of the update
that the same optimizer makes on fp32 copies has to be applied.
Exceptions: LoRA's A may get its gradient at step 2 (B = 0 before). Experts without a token are declared in may_idle; a
child of the model that the loss never calls is "not declared". Running statistics may change in the forward pass.
Master weights, Kahan summation and stochastic rounding may apply an update later: the same gradient is applied again.
A term that is inactive where training begins is judged in the state that active declares.
Warns: (row "parameters whose gradient cancels") a bias before a normalisation that subtracts it, and one on both sides
of a difference (a critic's output). They train nothing; bias=False leaves them out.
Detects: SkyRL #852 (A = B = 0), open-unlearning #178 (checkpointing cuts the graph), bf16 gates that never move,
prime-rl #1311, torchao #1124 (bf16 weights keep a tenth of their updates)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from earnest_audit.gradient import Gradient
from earnest_audit.law import Law, Rows
from earnest_audit.laws.arrival import SHARE, after_warmup, arrival
from earnest_audit.precision import is_coarse
from earnest_audit.probe import Probe
from earnest_audit.restore import observed, perturbation_sizes
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

STEPS = 2
CANCELS = 64 * torch.finfo(torch.float32).eps  # of the largest gradient: rounding in what adds up to 0


def check(probe: Probe) -> Rows:
    with probe.active():
        terms = list(_terms(probe))
    first = probe.own_gradient()
    if first.norm() > 0 or probe.step.active is None:
        yield from _judged(probe, first, terms)
    else:  # no term is active where training begins: parameters are judged where one is
        with probe.active():
            yield from _judged(probe, probe.own_gradient(), terms)


def _judged(probe: Probe, first: Gradient, terms: list[Finding]) -> Rows:
    step, norm = probe.step, first.norm()
    alone = "" if step.weighed else _inactive(step, step.name.removeprefix("term "))
    yield LAW.finding(
        step.name, f"gradient norm {norm:.3g}{alone}", "finite and above 0", first.finite() and norm > 0,
        "The step trains nothing, or on NaN. Look for a detach, a no_grad, advantages or a mask that are all 0, and "
        "old log-probs that are those of this forward pass, with their graph.",
    )  # fmt: skip
    yield from terms
    if not first.finite():
        return
    owned = None if step.optimizer is None else [p for g in step.optimizer.param_groups for p in g["params"]]
    yield _same_set(
        probe, "the optimizer's parameters", owned, "optimizer=…",
        "It was built before an adapter was attached or a layer replaced, a group was forgotten, or given twice. "
        "Several optimizers are given as a list.",
    )  # fmt: skip
    yield _same_set(
        probe, "the clipped parameters", step.clipped, "clipped=[…], what clip_grad_norm_ is given,",
        "What is left out is updated at its full length, whatever max_grad_norm is.",
    )  # fmt: skip
    # A norm that is held in place (an embedding's max_norm) settles at once: it is written once only.
    moved = probe.written() and probe.written_again()
    yield LAW.none(
        "the weights, after one call of the loss", moved, f"{len(moved)} tensors changed",
        " change with every call of the loss: noise in place, a clamp or a renormalisation adds up.",
    )  # fmt: skip
    with probe.training():
        yield from _train(probe, first)


def _terms(probe: Probe) -> Rows:
    """Every declared term by itself, with the weights of the others at 0."""
    weighed = probe.step.weighed
    off = {term: {k: 0.0 for k in weighed.values() if k != knob} for term, knob in weighed.items()}
    norms = {term: probe.own_gradient(others).norm() for term, others in off.items()}
    total = sum(norms.values())
    for term, norm in norms.items():
        share = f"{norm / total if total else 0.0:.0%} of the sum{_inactive(probe.step, term)}"
        yield LAW.finding(
            f"term {term}", f"gradient norm {norm:.3g}, {share}", "above 0", norm > 0,
            f"The term {term} adds nothing to the gradient. Look at its signal, mask and threshold, and for a detach.",
        )  # fmt: skip


def _inactive(step: Step, term: str) -> str:
    how = "" if step.active is None else step.active.terms.get(term, "")
    return f" (inactive at first; measured {how})" if how else ""


def _same_set(probe: Probe, subject: str, given: Sequence[Tensor] | None, declare: str, meaning: str) -> Finding:
    """The given parameters are the trainable ones, once each; frozen ones of the model may be among them."""
    if given is None:
        return LAW.not_declared(subject, declare)
    ids, mine = {id(p) for p in given}, {id(p) for p in probe.step.model.parameters()}
    missing = [n for n, p in probe.parameters.items() if id(p) not in ids]
    strangers, twice = len(ids - mine), len(given) - len(ids)
    return LAW.finding(
        subject, f"{len(missing)} trainable ones missing, {strangers} that are not the model's, {twice} twice",
        "exactly the trainable parameters, once each", not missing and not strangers and not twice,
        f"This is another set than what is trainable{f' (without {some(missing)})' if missing else ''}. {meaning}",
    )  # fmt: skip


def _train(probe: Probe, first: Gradient) -> Rows:
    """A few real steps from the real state: a perturbation would hide a parameter that stays at 0 · 0."""
    step, names = probe.step, list(probe.parameters)
    before = {n: bits(p) for n, p in step.model.named_parameters()}
    frozen = [n for n, p in step.model.named_parameters() if n not in probe.parameters and not p.requires_grad]
    born = {n: bits(t) for n, t in step.model.named_buffers()}
    pushed, sizes = set[str](), dict[str, float]()
    for number in range(STEPS):
        gradient = first if number == 0 else probe.own_gradient()
        sizes |= {n: max(sizes.get(n, 0.0), largest_entry(g)) for n, g in gradient.parts.items() if g is not None}
        # A running statistic moves in the forward pass, legitimately; a buffer that an update moves is a frozen weight.
        buffers = {n: bits(t) for n, t in step.model.named_buffers()}
        _update(probe, gradient.parts)
        pushed |= {n for n, t in step.model.named_buffers() if buffers.get(n) != bits(t)}
    if step.optimizer is not None and not any(group.get("lr", 1.0) for group in step.optimizer.param_groups):
        yield LAW.finding("learning rate", "0", "above 0", False, "Nothing moves, or gets a gradient after a move.")
    alive = {n for n, most in sizes.items() if most > 0}
    least = CANCELS * max(sizes.values(), default=0.0)
    zero = {n for n, most in sizes.items() if least > 0 and most <= least and probe.parameters[n].ndim <= 1}
    silent, pairs = [n for n in names if n not in alive and not idles(n, step.may_idle)], step.kind == "preference"
    offset, dead = [n for n in silent if n in zero], [n for n in silent if n not in zero]
    heads = _uncalled(probe, dead) if dead else []
    for head in heads:
        dead = [n for n in dead if not n.startswith(f"{head}.")]
        yield LAW.not_declared(f"{head}, which the loss never calls", f'may_idle=("{head}.*",), or freeze it,')
    idle = len(names) - len(alive) - len(dead) - len(offset)
    yield LAW.finding(
        f"{len(names)} trainable parameters",
        f"{len(alive)} got a gradient within {STEPS} steps" + (f", {idle} idle" if idle else "")
        + (f"; {some(offset)} cancels in every pair and trains nothing" if offset and pairs else ""),
        "all but those that may idle" if step.may_idle or heads else "all", not dead,
        f"No gradient reaches {some(dead)}: a detach, a bypass, checkpointing that cuts the graph, two factors of 0. "
        'Declare what idles by design (experts, a bias that cancels): may_idle=("*.experts.*", "head.bias").',
    )  # fmt: skip
    still = [n for n, p in probe.parameters.items() if bits(p) == before[n] and n in alive]
    lost = ([] if pairs else offset) + [n for n in still if n in zero and step.optimizer is not None]
    if lost:
        yield cancelling(lost)
    if step.optimizer is None:
        yield LAW.not_declared("the parameters' bits", "optimizer=…")
        return
    still = [n for n in still if n not in lost]
    found = arrival(probe, first, still)
    if found is not None:  # what could not be written yet may be kept for later, or rounded at random
        still = [n for n in still if n not in found.moved and not (found.random and is_coarse(probe.parameters[n]))]
    yield LAW.finding(
        f"{len(names)} trainable parameters", f"{len(alive) - len(still)} changed their bits",
        f"all that got a gradient ({len(alive)})", not still,
        f"{some(still)} get a gradient and do not move: the optimizer does not own them, or rounding to their dtype "
        "loses the update (keep them in fp32, or raise the learning rate).",
    )  # fmt: skip
    if found is not None and found.share is not None:
        yield LAW.finding(
            "updates in 16 bits",
            f"{found.share:.0%} of an fp32 update in {found.steps} steps of one gradient"
            + (f" ({len(found.masters)} have a master copy)" if found.masters else "")
            + (" (the update rounds at random)" if found.random else ""),
            f"≥ {SHARE:.0%}", found.arrives,
            "Rounding to the parameters' 16 bits loses most of every update, at this learning rate: keep them (or a "
            "master copy in the optimizer) in fp32, round at random, or raise the learning rate.",
        )  # fmt: skip
    moved = [n for n, p in step.model.named_parameters() if n in frozen and before[n] != bits(p)] + sorted(pushed)
    running = sum(born.get(n) != bits(t) for n, t in step.model.named_buffers() if n not in pushed)
    aside = f"; {running} buffers did in the forward pass, as running statistics do" if running else ""
    yield LAW.none(
        f"{len(frozen)} frozen parameters, {len(born)} buffers", moved, f"{len(moved)} moved{aside}",
        " moved although frozen: the optimizer or a hook reaches further than declared.",
    )  # fmt: skip


def _uncalled(probe: Probe, dead: Sequence[str]) -> list[str]:
    """Children of the model of which the loss calls no part, and whose every parameter is dead: other losses' heads."""
    model, called = probe.step.model, set[nn.Module]()
    with observed(model.modules(), lambda module, *_: called.add(module)):
        probe.look(dict(probe.step.batch))
    idle = {name: child for name, child in model.named_children() if called.isdisjoint(child.modules())}
    owned = {name: {f"{name}.{n}" for n, _ in child.named_parameters()} for name, child in idle.items()}
    return [name for name, own in owned.items() if own and own <= set(dead)]


def idles(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter is declared to get no gradient from some batches."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _update(probe: Probe, parts: Mapping[str, Tensor | None]) -> None:
    step, optimizer = probe.step, probe.step.optimizer
    for name, p in probe.parameters.items():
        g, sparse = parts[name], name in probe.sparse and optimizer is not None
        p.grad = None if g is None else g.to_sparse(1) if sparse else g.clone()
    owned = [p for p in probe.parameters.values() if p.grad is not None]
    if optimizer is not None:
        after_warmup(optimizer)
    if step.update is not None:
        step.update()
        return
    if step.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(owned if step.clipped is None else step.clipped, step.max_grad_norm)
    if optimizer is None and owned:  # a small step of our own, only to leave the initial state
        sizes = zip(owned, perturbation_sizes(owned, 1e-3), strict=True)
        optimizer = torch.optim.Rprop([{"params": [p], "lr": size} for p, size in sizes])
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def cancelling(names: list[str]) -> Finding:
    return LAW.doubtful(LAW.finding(
        "parameters whose gradient cancels", f"{len(names)} with a gradient of 0, up to rounding", "0", False,
        f"{some(names)} are reached by the loss, which does not depend on them.",
    ))  # fmt: skip


def largest_entry(gradient: Tensor) -> float:
    """Its largest entry, without a sign."""
    return float(gradient.detach().abs().max()) if gradient.numel() else 0.0


def bits(t: Tensor) -> bytes:
    """A hash of a tensor's bits: equal for equal bits, 16 bytes long."""
    raw = t.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).digest()


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


LAW = Law("GL", "liveness", __doc__, check, from_start=True)
