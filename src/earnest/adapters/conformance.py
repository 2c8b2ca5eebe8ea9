"""The conformance table: every variant × dtype × model against the same checks. `earnest adapters --check` prints it.

A check is a function of a `Case` that raises `Broken`. tests/adapters/test_mutants.py lists broken variants, each with
the check that finds it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from earnest.adapters.attach import attach
from earnest.adapters.cases import DTYPES, MODELS, SUBJECTS, Broken, Case, first_linear, need, perturb
from earnest.adapters.cases import subjects as subjects
from earnest.adapters.cases import tiny_gpt2 as tiny_gpt2
from earnest.adapters.cases import tiny_llama as tiny_llama
from earnest.adapters.errors import AdapterError
from earnest.adapters.files import load_adapter
from earnest.adapters.variant import get_variant
from earnest.deprecated import old_names

__getattr__ = old_names(globals(), {"kick": "perturb"})


def _bits(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def _refuses(message: str, act: Callable[[], object]) -> None:
    """Break with this message unless ``act`` raises an ``AdapterError``."""
    try:
        act()
    except AdapterError:
        return
    raise Broken(message)


def identity(case: Case) -> None:
    """The outputs at initialization are bit-exactly those of the base."""
    model, _ = case.ready(perturbed=False)
    case.equal(case.logits(model), case.base_logits, "logits at initialization")


def gradients(case: Case) -> None:
    """At step 1 exactly the declared tensors have a zero gradient; later none has. The base never has a gradient."""
    model, adapter = case.ready(perturbed=False)
    case.loss(model).backward()
    zero = {n for n, p in adapter.named_parameters().items() if p.grad is None or not bool(p.grad.any())}
    declared = adapter.inactive_at_initialization()
    need(zero == declared, f"without gradient at step 1: {sorted(zero ^ declared)[:2]} differ from the declaration")
    own = {id(p) for p in adapter.parameters()}
    leaks = [n for n, p in model.named_parameters() if id(p) not in own and (p.grad is not None or p.requires_grad)]
    need(not leaks, f"base gradient on {leaks[:1]}")
    wrong = [n for n, p in adapter.named_parameters().items() if p.dtype != torch.float32]
    need(not wrong, f"{wrong[:1]} is not fp32")
    perturb(adapter)
    for p in adapter.parameters():
        p.grad = None
    case.loss(model).backward()
    dead = [n for n, p in adapter.named_parameters().items() if p.grad is None or not bool(p.grad.any())]
    need(not dead, f"no gradient after a perturbation: {dead[:2]}")


def training(case: Case) -> None:
    """Training changes every tensor, lowers the loss and leaves the base's bits; off() gives the base."""
    model = case.model()
    before = _bits(model)
    adapter = case.attach(model)
    start = {n: p.detach().clone() for n, p in adapter.named_parameters().items()}
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = case.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    need(min(losses[1:]) < losses[0], f"the loss does not fall: {losses[0]:.4f} → {losses[-1]:.4f}")
    still = [n for n, p in adapter.named_parameters().items() if torch.equal(p, start[n])]
    need(not still, f"not moved by training: {still[:2]}")
    need(not torch.equal(case.logits(model), case.base_logits), "training does not change the output")
    after = _bits(model)
    need(before.keys() == after.keys(), "the base's state_dict has other keys")
    changed = [n for n in before if not torch.equal(before[n], after[n])]
    need(not changed, f"base weights changed: {changed[:2]}")
    with adapter.off():
        case.equal(case.logits(model), case.base_logits, "off()")


def liveness(case: Case) -> None:
    """Every parameter tensor, perturbed alone, changes the output."""
    model, adapter = case.ready()
    here = case.logits(model)
    need(not torch.equal(here, case.base_logits), "a perturbed adapter gives the base's output")
    for name, p in adapter.named_parameters().items():
        keep = p.detach().clone()
        with torch.no_grad():
            p.add_(0.5 * (1 + p.abs()) * torch.where(torch.arange(p.numel()).view(p.shape) % 2 == 0, 1.0, -0.7).to(p))
        moved = case.logits(model)
        with torch.no_grad():
            p.copy_(keep)
        need(not torch.equal(moved, here), f"{name} does not change the output")
    case.equal(case.logits(model), here, "after putting every parameter back")


def strictness(case: Case) -> None:
    """Empty, unrelated, incomplete, larger, misshapen and non-finite states are refused, and change nothing."""
    model, adapter = case.ready()
    good = adapter.state_dict()
    here = case.logits(model)
    first = next(iter(good))
    bad = {
        "empty": {},
        "unrelated": {f"other.{k}": v for k, v in good.items()},
        "one missing": {k: v for k, v in good.items() if k != first},
        "one more": good | {"extra.A": torch.zeros(2)},
        "misshapen": good | {first: torch.zeros(1, 2, 3)},
        "not finite": good | {first: torch.full_like(good[first], float("nan"))},
    }
    for what, state in bad.items():
        _refuses(f"a state that is {what} was loaded", partial(adapter.load_state_dict, state))
    case.equal(case.logits(model), here, "after refused loads")


def merging(case: Case) -> None:
    """Merging changes the output by one rounding at most; unmerging restores every bit; tied weights elsewhere stay."""
    model, adapter = case.ready()
    here, before = case.logits(model), _bits(model)
    objects = {n: id(p) for n, p in model.named_parameters()}
    try:
        with adapter.merged():
            case.close(case.logits(model), here, "merged")
            need(not torch.equal(case.logits(model), case.base_logits), "merged gives the base's output")
            raise KeyboardInterrupt  # restoring must survive an exception
    except KeyboardInterrupt:
        pass
    case.equal(case.logits(model), here, "after unmerging")
    after = _bits(model)
    need(all(torch.equal(before[n], after[n]) for n in before), "unmerging does not restore the bits")
    need(objects == {n: id(p) for n, p in model.named_parameters()}, "unmerging does not restore the tensors")


def saving(case: Case) -> None:
    """A reload on a fresh model is bit-equal; with one tensor of the file set to zero it is not."""
    model, adapter = case.ready()
    here = case.logits(model)
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(folder)
        fresh = case.model()
        again = load_adapter(fresh, folder)
        case.equal(case.logits(fresh), here, "reloaded")
        for name, tensor in again.named_tensors().items():
            keep = tensor.detach().clone()
            with torch.no_grad():
                tensor.zero_()
            need(
                not torch.equal(case.logits(fresh), here), f"{name} zeroed gives the same output, so it need not exist"
            )
            with torch.no_grad():
                tensor.copy_(keep)
        other = case.model()
        with torch.no_grad():
            path = next(iter(adapter.slots))
            other.get_submodule(path).weight.mul_(1.5)  # type: ignore[operator]
        _refuses("loaded onto other base weights", lambda: load_adapter(other, folder))


def scaling(case: Case) -> None:
    """Scale 0.5 differs from 0 and from 1, and survives merging, saving and loading."""
    model, adapter = case.ready()
    whole = case.logits(model)
    adapter.scale = 0.5
    half = case.logits(model)
    need(not torch.equal(half, whole), "scale 0.5 gives the output of scale 1")
    need(not torch.equal(half, case.base_logits), "scale 0.5 gives the base's output")
    with torch.no_grad(), adapter.merged():
        case.close(case.logits(model), half, "merged at scale 0.5")
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(folder)
        fresh = case.model()
        need(load_adapter(fresh, folder).scale == 0.5, "the scale is lost on disk")
        case.equal(case.logits(fresh), half, "reloaded at scale 0.5")


def stacking(case: Case) -> None:
    """On top of a frozen LoRA: exact at initialization, each works alone, no gradient below, detached in any order."""
    model = case.model()
    history = attach(model, get_variant("lora", rank=2), targets=case.targets, seed=5)
    perturb(history, seed=11)
    history.freeze()
    below = case.logits(model)
    adapter = case.attach(model)
    case.equal(case.logits(model), below, "logits at initialization on top of another adapter")
    perturb(adapter)
    both = case.logits(model)
    need(not torch.equal(both, below), "the top adapter does nothing")
    case.loss(model).backward()
    frozen = [t.grad for t in history.named_tensors().values() if t.grad is not None]
    need(not frozen, "the frozen history has a gradient")
    need(all(p.grad is not None for p in adapter.parameters()), "the top adapter has no gradient")
    with adapter.off():
        case.equal(case.logits(model), below, "the history alone")
    with history.off():
        alone = case.logits(model)
    lone, single = case.ready()
    single.load_state_dict(adapter.state_dict())
    case.equal(alone, case.logits(lone), "the top alone")
    with torch.no_grad(), adapter.merged():
        case.close(case.logits(model), both, "a merged stack")
    history.detach()
    case.equal(case.logits(model), alone, "after detaching the history")
    adapter.detach()
    case.equal(case.logits(model), case.base_logits, "after detaching both")


def detaching(case: Case) -> None:
    """Detach restores bits, requires_grad, class, forward and hooks; a detached adapter refuses to act."""
    model = case.model()
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    classes = {n: type(m) for n, m in model.named_modules()}
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    own = [m.register_forward_hook(lambda *_: None) for m in (model, first_linear(model))]  # somebody else's
    hooks = _hooks(model)
    adapter = case.attach(model)
    perturb(adapter)
    case.loss(model).backward()
    adapter.detach()
    need(classes == {n: type(m) for n, m in model.named_modules()}, "detach does not restore modules or classes")
    need(flags == {n: p.requires_grad for n, p in model.named_parameters()}, "detach leaves requires_grad changed")
    need(hooks == _hooks(model), "detach leaves its hooks or removes another's")
    for hook in own:
        hook.remove()
    need(not any("forward" in m.__dict__ for m in model.modules()), "detach leaves a forward on an instance")
    case.equal(case.logits(model), case.base_logits, "detached")
    _refuses("a detached adapter accepted a new scale", lambda: setattr(adapter, "scale", 0.5))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(model: nn.Module) -> list[tuple[str, str, int, int]]:
    """(module, kind, key, id of the function): also finds a hook that replaced another."""
    return [
        (name, kind, key, id(hook))
        for name, module in model.named_modules()
        for kind in _HOOKS
        for key, hook in getattr(module, kind).items()
    ]


def checkpointing(case: Case) -> None:
    """Gradient checkpointing, reentrant or not, does not change the gradients."""
    grads = []
    for reentrant in (None, False, True):
        model, adapter = case.ready()
        model.train()
        if reentrant is not None:
            enable: Any = model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loss = case.loss(model)
        need(loss.requires_grad, f"no gradient with use_reentrant={reentrant}")
        loss.backward()
        need(all(p.grad is not None for p in adapter.parameters()), f"no gradient with use_reentrant={reentrant}")
        grads.append([p.grad.clone() for p in adapter.parameters() if p.grad is not None])
    for other in grads[1:]:
        for a, b in zip(other, grads[0], strict=True):
            case.close(a, b, "gradient under checkpointing")


def compiling(case: Case) -> None:
    """`torch.compile(fullgraph=True)` gives the same loss and gradients."""
    model, adapter = case.ready()
    want = case.loss(model)
    want.backward()
    eager = [p.grad.clone() for p in adapter.parameters() if p.grad is not None]
    for p in adapter.parameters():
        p.grad = None
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        got = case.loss(compiled)  # type: ignore[arg-type]
    except torch._dynamo.exc.TorchDynamoException as e:
        raise Broken(f"does not compile into one graph: {str(e).splitlines()[0]}") from e
    got.backward()
    case.close(got, want, "compiled loss")
    for a, p in zip(eager, adapter.parameters(), strict=True):
        assert p.grad is not None
        case.close(p.grad, a, "compiled gradient")
    ids = case.ids[:, :-1]  # the loss's length: another one would be compiled again, with dynamic shapes
    with adapter.off():
        case.equal(compiled(ids).logits, model(ids).logits, "compiled, off")


CHECKS: dict[str, Callable[[Case], None]] = {
    f.__name__: f
    for f in (
        identity, gradients, training, liveness, strictness, merging, saving, scaling, stacking, detaching,
        checkpointing,
    )
}  # fmt: skip
SLOW_CHECKS: dict[str, Callable[[Case], None]] = {"compiling": compiling}  # slow, so on one model in one dtype


@dataclass(frozen=True)
class ConformanceRow:
    """One variant's line."""

    variant: str
    reference: str
    parameters: int
    init: str
    step1: str
    dtypes: str
    forward: str
    faults: tuple[str, ...]

    @property
    def verdict(self) -> str:
        return "ok" if not self.faults else "BROKEN: " + "; ".join(self.faults[:3])


def check_subject(
    label: str, models: Iterable[str], dtypes: Iterable[str], checks: dict[str, Callable[[Case], None]], slow: bool
) -> ConformanceRow:
    name, settings = SUBJECTS[label]
    variant = get_variant(name, **settings)
    faults, passed, parameters, exact = [], [], 0, True
    for dtype in dtypes:
        clean = True
        for model in models:
            case = Case(variant, MODELS[model], DTYPES[dtype])
            parameters = parameters or case.ready()[1].report.trainable
            first, slow = slow, False
            for check_name, check in (checks | SLOW_CHECKS if first else checks).items():
                try:
                    check(case)
                except Exception as e:  # an error of one variant belongs in its row and does not end the table
                    faults.append(f"{check_name} on {model} {dtype}: {e}")
                    clean = False
                    exact = exact and check_name != "identity"
        passed += [dtype] if clean else []
    zero = ", ".join(sorted(variant.inactive()))
    hooks = {"before": "input", "factors": "low-rank", "after": "output"}
    forward = " + ".join(word for hook, word in hooks.items() if variant.uses(hook))
    return ConformanceRow(
        label, variant.reference, parameters, "bit-exact" if exact else "NOT the base",
        f"all but {zero}" if zero else "all", " ".join(passed), forward, tuple(faults),
    )  # fmt: skip


def run(
    labels: Iterable[str] | None = None,
    models: Iterable[str] = ("llama", "gpt2", "nano"),
    dtypes: Iterable[str] = ("fp32", "bf16", "fp16"),
    compile: bool = False,
) -> Iterator[ConformanceRow]:
    """Check variants one after the other and yield a row for each. ``compile`` adds the slow check of torch.compile."""
    for label in labels if labels is not None else SUBJECTS:
        if label not in SUBJECTS:
            raise AdapterError(f"unknown subject {label!r}; known: {', '.join(SUBJECTS)}")
        yield check_subject(label, list(models), list(dtypes), CHECKS, slow=compile)


COLUMNS = ("variant", "reference", "parameters", "init", "step-1 gradient", "dtypes", "forward", "verdict")


def cells(row: ConformanceRow) -> tuple[str, ...]:
    """A row's cells, in the order of COLUMNS."""
    return (
        row.variant, row.reference, f"{row.parameters:,}", row.init, row.step1, row.dtypes, row.forward, row.verdict,
    )  # fmt: skip
