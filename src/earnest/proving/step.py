"""An engine's training step as a ``Step``: inputs, settings, terms and metrics are read from the engine.

The loss below computes hidden states → vocabulary pass → objective with plain autograd. The engine computes scalars,
derivatives and backward in micro-batches. Law DF checks that both have the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from earnest.engines.local import LocalEngine
from earnest.engines.vocabulary import scalars as vocabulary_scalars
from earnest.models.policy import Policy
from earnest.objectives.base import Objective, Term, Weighted
from earnest.objectives.needs import LogProb, Need, SpectralNorm
from earnest.proving import metrics as known_metrics
from earnest.proving import settings as own_settings
from earnest.signals.batch import Batch, Reference, Teacher
from earnest.signals.distributions import FullLogits, Hidden
from earnest_audit.facts import Metric
from earnest_audit.step import Backward, Family, Step

Data = Mapping[str, Any]


def step_of(
    engine: LocalEngine, objective: Objective | Term, batch: Batch, *, update: Callable[[], Any] | None = None
) -> Step:
    """The engine's step on this batch, declared for the audit. ``update`` replaces the engine's own."""
    objective = Objective.of(objective)
    live = list(objective.live())
    labels = [w.term.label for w in live]
    gradient_like = [w for w in live if "advantages" in w.term.signals()]
    summed = [w for w in live if w not in gradient_like] if len(live) > 1 else []
    data, roles = _data(batch)
    state = {**objective.initial_state(), **engine.objective_state}
    read = _read(live, objective.needs(batch, state))
    prefixes = known_metrics.named(live, all(bool(w.term.tokens(batch).all()) for w in live))

    def loss(model: nn.Module, changed: Data, **knobs: Any) -> tuple[Tensor, dict[str, Tensor | float]]:
        now = own_settings.rebuild(objective, knobs)
        rows = _batch(batch, changed)
        if not any(w.weight for w in now.terms):
            return sum(p.sum() for p in model.parameters() if p.requires_grad) * 0.0, {}  # type: ignore[return-value]
        needs = now.needs(rows, state)
        if model is not engine.policy.model and any(isinstance(n, SpectralNorm) for n in needs):
            raise ValueError("a spectral norm is read from the engine's own adapter")
        fields = engine.parameter_fields(needs) | _fields(engine, model, rows, needs)
        result = now.evaluate(rows, fields, state)
        losses = {label: value.loss for label, value in result.values.items()}
        return result.loss, {**losses, **known_metrics.read(result.values, prefixes)}

    def logprobs(model: nn.Module, changed: Data) -> Tensor:
        rows = _batch(batch, changed)
        need = LogProb(batch.temperature)
        flat = _fields(engine, model, rows, [need])[need].values
        if gradient_like:  # no term reads the advantages of rows of other roles
            read_by = tuple({role for w in gradient_like for role in w.term.roles})
            flat = flat * rows.has_role(read_by)[rows.row].to(flat.dtype)
        whole = torch.zeros(rows.inputs.shape, dtype=flat.dtype, device=flat.device)
        return whole.index_put((rows.row, rows.position), flat)

    def student(model: nn.Module, changed: Data) -> Tensor:
        rows = _batch(batch, changed)
        states = _hidden(engine, model, rows)
        form = batch.teacher.distribution if batch.teacher is not None else None
        return _policy(engine, model).head.logits(states) if isinstance(form, FullLogits) else states

    def backward(knobs: Mapping[str, Any], micro_tokens: int | None = None) -> None:
        held, engine.micro_tokens = engine.micro_tokens, micro_tokens or engine.micro_tokens
        try:
            found = engine.gradients(batch, own_settings.rebuild(objective, knobs))
        finally:
            engine.micro_tokens = held
        for p, gradient in zip(engine.parameters, found.values(), strict=True):
            p.grad = gradient

    paths: dict[str, Backward] = {}
    if not any("batch_local" in w.term.laws for w in live):  # one row per micro-batch
        row = max(1, int(batch.length.max()))
        paths["the engine's backward pass in micro-batches"] = Backward(lambda knobs: backward(knobs, row))
    values = objective.evaluate(batch, engine.scalars(batch, objective.needs(batch, state)), state).values
    stop = any("stop_gradient" in w.term.laws for w in live) or bool(engine.adapter.variant.detached)
    plain = batch.teacher is not None and isinstance(batch.teacher.distribution, Hidden | FullLogits)
    return Step(
        model=engine.policy.model,
        loss=loss,
        batch=data,
        roles={role: key for role, key in roles.items() if key in read},
        settings=own_settings.declared(live, [w.term.label for w in summed]),
        metrics=known_metrics.facts(live, values, prefixes) | _weights(summed),
        logprobs=logprobs if batch.targets.ndim == 2 else None,
        student=student if plain and "teacher" in read and len(labels) == 1 else None,
        family=_family(live, batch),
        value_is_loss=not stop,
        # If terms divide by different counts, the gradient of the sum is not a combination of two parts' gradients.
        rows_interact=not objective.additive or len(live) > 1 or any("batch_local" in w.term.laws for w in live),
        may_idle=("*.experts.*",) if any(slot.of_experts for slot in engine.adapter.slots.values()) else (),
        name=" + ".join(labels) if len(labels) > 1 else f"term {labels[0]}",
        optimizer=engine.optimizer,
        max_grad_norm=engine.max_grad_norm,
        clipped=engine.parameters,
        backward=backward,
        update=update or engine.update,
        paths=paths,
        weighed={label: f"{label}.weight" for label in labels} if len(labels) > 1 else {},
    )


def _weights(summed: Sequence[Weighted]) -> dict[str, Metric]:
    """Terms whose value falls where their own gradient is followed, each with the setting that weighs it."""
    labels = [w.term.label for w in summed if "stop_gradient" not in w.term.laws]
    return {label: Metric(weight=f"{label}.weight") for label in labels}


def _family(live: list[Weighted], batch: Batch) -> Family | None:
    signals = {s for w in live for s in w.term.signals()}
    if "advantages" in signals:
        return "policy gradient"
    if any("chosen" in w.term.roles and "rollout" not in w.term.roles for w in live):
        return "preference"
    if "teacher" in signals:
        return "divergence"
    # A likelihood alone: with a barrier, a bonus or a KL the step is not pure imitation.
    plain = all(not w.term.signals() and any(isinstance(n, LogProb) for n in w.term.needs(batch, {})) for w in live)
    return "sft" if plain else None


# --- a batch as a dict of [R, T, …] tensors, and back -----------------------------------------------------------------


def _data(batch: Batch) -> tuple[dict[str, Tensor], dict[str, str]]:
    per_row = ("inputs", "targets", "weight", "length", "group", "pair", "correct", "kl_baseline")
    data: dict[str, Tensor] = {name: value for name in per_row if (value := getattr(batch, name)) is not None}
    data["row"] = torch.arange(len(batch), device=batch.device)
    roles = {"ids": "inputs", "labels": "targets", "mask": "weight"}
    roles |= {"correct": "correct"} if "correct" in data else {}
    flat: dict[str, Tensor | None] = {name: getattr(batch, name) for name in ("advantages", "behaviour", "proximal")}
    if batch.reference is not None:
        flat["reference"] = batch.reference.logprobs
        if isinstance(batch.reference.distribution, Hidden):
            flat["reference_distribution"] = batch.reference.distribution.states
    if batch.teacher is not None and isinstance(batch.teacher.distribution, Hidden | FullLogits):
        form = batch.teacher.distribution
        values = form.states if isinstance(form, Hidden) else form.logits
        at = torch.arange(batch.active.shape[0], device=batch.device) if batch.teacher.at is None else batch.teacher.at
        whole = torch.zeros(batch.active.shape[0], values.shape[1], dtype=values.dtype, device=values.device)
        flat["teacher"] = whole.index_copy(0, at, values)
    for name, values_ in flat.items():
        if values_ is not None:
            whole = torch.zeros(*batch.inputs.shape, *values_.shape[1:], dtype=values_.dtype, device=values_.device)
            data[name] = whole.index_put((batch.row, batch.position), values_)
            roles[name] = name
    return data, roles


def _read(live: list[Weighted], needs: Sequence[Need]) -> set[str]:
    """The keys of the batch that these terms read."""
    names = {"reference.logprobs": "reference", "reference.distribution": "reference_distribution"}
    read = {names.get(s, s) for w in live for s in w.term.signals()}
    if any(not isinstance(n, SpectralNorm) for n in needs):
        read |= {"inputs", "weight"}
    return read | ({"targets"} if any(isinstance(n, LogProb) for n in needs) else set())


def _batch(original: Batch, data: Data) -> Batch:
    """The typed batch of these rows. Rows may have been permuted, repeated, cut or added; ``row`` has their original
    numbers."""
    source = data["row"].tolist()
    weight = data["weight"]
    on = (weight if weight.ndim == 2 else weight.abs().sum(-1)) != 0

    def flat(name: str) -> Tensor | None:
        return data[name][on] if name in data else None

    teacher = reference = None
    if original.teacher is not None:
        teacher = _teacher(original, data, on, source)
    if original.reference is not None:
        states = flat("reference_distribution")
        form = Hidden(states) if states is not None else original.reference.distribution
        reference = Reference(flat("reference"), form, original.reference.kind)
    return Batch(
        inputs=data["inputs"],
        targets=data["targets"].clamp_min(0),
        weight=weight,
        length=data["length"],
        role=tuple(original.role[i] for i in source),
        group=data["group"],
        pair=_unique_pairs(data["pair"], [original.role[i] for i in source]),
        policy_version=original.policy_version[data["row"]],
        advantages=flat("advantages"),
        behaviour=flat("behaviour"),
        proximal=flat("proximal"),
        reference=reference,
        teacher=teacher,
        correct=data.get("correct"),
        kl_baseline=data.get("kl_baseline"),
        temperature=original.temperature,
        max_length=original.max_length,
        estimator=original.estimator,
    )


def _teacher(original: Batch, data: Data, on: Tensor, source: list[int]) -> Teacher:
    assert original.teacher is not None
    form, at = original.teacher.distribution, original.teacher.at
    tokens = torch.arange(original.active.shape[0], device=original.device) if at is None else at
    numbers = torch.full(original.inputs.shape, -1, device=original.device)  # of the teacher's rows; -1 where none is
    numbers[original.row[tokens], original.position[tokens]] = torch.arange(len(tokens), device=original.device)
    wide = torch.full(on.shape, -1, device=original.device)
    wide[:, : numbers.shape[1]] = numbers[torch.tensor(source, device=original.device)][:, : on.shape[1]]
    covered = on if at is None else on & (wide >= 0)
    if "teacher" not in data:
        found = form.take(wide[covered])
    else:
        values = data["teacher"][covered]
        found = Hidden(values) if isinstance(form, Hidden) else FullLogits(values)
    return Teacher(found, covered[on].nonzero()[:, 0], original.teacher.kind)


def _unique_pairs(pair: Tensor, role: list[Any]) -> Tensor:
    """The pair numbers, with a new number for each repetition of a pair."""
    seen: dict[tuple[int, Any], int] = {}
    step = int(pair.max()) + 1 if len(pair) else 1
    numbers = []
    for value, kind in zip(pair.tolist(), role, strict=True):
        count = seen.get((value, kind), 0)
        seen[(value, kind)] = count + 1
        numbers.append(value if value < 0 else value + count * step)
    return torch.tensor(numbers, device=pair.device)


def _policy(engine: LocalEngine, model: nn.Module) -> Policy:
    return engine.policy if model is engine.policy.model else replace(engine.policy, model=model)


def _hidden(engine: LocalEngine, model: nn.Module, rows: Batch) -> Tensor:
    """The hidden states with this rank's own graph: the audit differentiates this loss without the engine."""
    with engine.whole_layers():
        return _policy(engine, model).hidden(rows.inputs)


def _fields(engine: LocalEngine, model: nn.Module, rows: Batch, needs: Any) -> dict[Any, Any]:
    policy = _policy(engine, model)
    hidden = _hidden(engine, model, rows)[rows.row, rows.position]
    wanted = [n for n in needs if not isinstance(n, SpectralNorm)]
    return dict(vocabulary_scalars(hidden, policy.head, rows, wanted)) if wanted else {}
