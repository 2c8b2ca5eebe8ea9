"""``Batch``: rows of tokens and the typed signals that come with them.

Position t of a row predicts ``targets[:, t]``; nothing is shifted anywhere else. Rows are padded on the right, so a
causal model never sees padding and no attention mask is needed. A token is *active* where its weight is not 0; every
per-token quantity behind the vocabulary pass is flat over the N active tokens, row by row. Shapes: R rows, T
positions, K targets a position, N active tokens, M tokens that a signal covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from earnest.errors import SignalError
from earnest.signals.distributions import Distribution, check_logprobs

Role = Literal["rollout", "chosen", "rejected", "demonstration"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, eq=False)
class Teacher:
    """A distribution for the active tokens ``at`` (None: for all of them), in their order.

    ``kind`` says who it is ("live", "base", "ema", …); a teacher has read a prompt of its own, so it is never
    recomputed from ``Batch.inputs``. ``logprobs`` are its exact log-probs of the batch's targets: beside a ``TopK``
    they are never looked up in it.
    """

    distribution: Distribution
    at: Int[Tensor, " M"] | None = None
    kind: str = "given"
    logprobs: Float[Tensor, " M"] | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            if tuple(self.logprobs.shape) != (len(self.distribution),):
                raise SignalError(
                    f"Teacher.logprobs must have shape [{len(self.distribution)}], one a token that the teacher "
                    f"covers, got {tuple(self.logprobs.shape)}."
                )
            check_logprobs("Teacher.logprobs", self.logprobs)
        if self.at is not None and len(self.distribution) != self.at.shape[0]:
            raise SignalError(
                f"the teacher has {len(self.distribution)} token distributions for {self.at.shape[0]} positions; give "
                "one each."
            )


@dataclass(frozen=True, eq=False)
class Reference:
    """The reference policy π₀ on the batch's own rows: exact log-probs of the targets, and a distribution if one is
    needed.

    ``logprobs`` are at the batch's sampling temperature, like ``Batch.behaviour``; the distribution is at temperature
    1.
    """

    logprobs: Float[Tensor, " N"] | None = None
    distribution: Distribution | None = None
    kind: str = "base"


@dataclass(frozen=True)
class Counts:
    """What an objective may divide by, counted over the whole optimizer batch (and all ranks), never over a part."""

    tokens: float
    sequences: int
    max_length: int
    coverage: float = 1.0
    left_out: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """One optimizer batch. Every tensor lives on one device; optional signals are None where nobody supplied them.

    ``behaviour`` are the log-probs of whoever sampled, ``proximal`` the trainer's own of the same tokens at that
    time: they differ where sampler and trainer are two programs. ``estimator`` names what made the advantages,
    ``sought`` the roles that its maker looked for, found or not; ``max_length`` is the longest completion that
    sampling allowed.
    """

    inputs: Int[Tensor, "R T"]
    targets: Int[Tensor, "R T"] | Int[Tensor, "R T K"]
    weight: Float[Tensor, "R T"] | Float[Tensor, "R T K"]
    length: Int[Tensor, " R"]
    role: tuple[Role, ...]
    group: Int[Tensor, " R"]
    pair: Int[Tensor, " R"]
    policy_version: Int[Tensor, " R"]
    advantages: Float[Tensor, " N"] | None = None
    behaviour: Float[Tensor, " N"] | None = None
    proximal: Float[Tensor, " N"] | None = None
    reference: Reference | None = None
    teacher: Teacher | None = None
    correct: Bool[Tensor, " R"] | None = None
    temperature: float = 1.0
    max_length: int | None = None
    estimator: str = "given"
    sought: tuple[Role, ...] = ()

    def __post_init__(self) -> None:
        R, T = self.inputs.shape
        if self.targets.shape[:2] != (R, T) or self.weight.shape != self.targets.shape:
            raise SignalError(
                f"inputs {tuple(self.inputs.shape)}, targets {tuple(self.targets.shape)} and weight "
                f"{tuple(self.weight.shape)} "
                "must agree: [R,T], [R,T] or [R,T,K], and the targets' shape. Nothing is broadcast."
            )
        if len(self.role) != R or any(r not in ROLES for r in self.role):
            raise SignalError(f"role must name one of {ROLES} for each of the {R} rows, got {self.role!r}.")
        for name in ("length", "group", "pair", "policy_version", "correct"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (R,):
                raise SignalError(f"Batch.{name} must have shape [{R}], one value a row, got {tuple(value.shape)}.")
        if not torch.isfinite(self.weight).all():
            raise SignalError(
                "Batch.weight has a value that is not finite; a weight is 0 (not trained on) or a finite number."
            )
        if not self.temperature > 0:
            raise SignalError(
                f"Batch.temperature must be above 0, got {self.temperature}; greedy samples are scored at 1.0."
            )
        if self.active.shape[0] == 0:
            raise SignalError("the batch has no active token: every weight is 0. Check the completion mask.")
        late = self.position >= self.length[self.row]
        if bool(late.any()):
            raise SignalError(
                f"{int(late.sum())} active tokens lie behind the end of their row (first: row "
                f"{int(self.row[late][0])}, "
                f"position {int(self.position[late][0])}); padding must have weight 0."
            )
        N = self.active.shape[0]
        for name in ("advantages", "behaviour", "proximal"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (N,):
                raise SignalError(
                    f"Batch.{name} must have shape [{N}], one value an active token, got {tuple(value.shape)}; "
                    "use Batch.from_rows or batch.flatten to gather a [R, T] tensor."
                )
            if value is not None and not torch.isfinite(value).all():
                raise SignalError(f"Batch.{name} has {int((~torch.isfinite(value)).sum())} values that are not finite.")
        for name in ("behaviour", "proximal"):
            if getattr(self, name) is not None:
                check_logprobs(f"Batch.{name}", getattr(self, name))
        self._check_reference(N)
        if self.teacher is not None:
            covered = N if self.teacher.at is None else self.teacher.at.shape[0]
            if len(self.teacher.distribution) != covered:
                raise SignalError(
                    f"the teacher covers {len(self.teacher.distribution)} tokens, the batch has {N} active ones."
                )
            at = self.teacher.at
            if at is not None and at.numel() and not bool((at[1:] > at[:-1]).all() and at[0] >= 0 and at[-1] < N):
                raise SignalError(
                    f"Teacher.at must be strictly increasing positions below {N}, the number of active tokens."
                )

    def _check_reference(self, N: int) -> None:
        if self.reference is None:
            return
        logprobs, distribution = self.reference.logprobs, self.reference.distribution
        if logprobs is not None:
            if tuple(logprobs.shape) != (N,):
                raise SignalError(
                    f"Reference.logprobs must have shape [{N}], one an active token, got {tuple(logprobs.shape)}."
                )
            check_logprobs("Reference.logprobs", logprobs)
        if distribution is not None and len(distribution) != N:
            raise SignalError(f"the reference covers {len(distribution)} tokens, the batch has {N} active ones.")

    # --- the flat layout of active tokens ---------------------------------------------------------------------------

    @cached_property
    def active(self) -> Int[Tensor, "N 2"]:
        """(row, position) of every active token, row-major; this order is the flat order everywhere."""
        on = self.weight != 0
        return (on if on.ndim == 2 else on.any(-1)).nonzero()

    @property
    def row(self) -> Int[Tensor, " N"]:
        return self.active[:, 0]

    @property
    def position(self) -> Int[Tensor, " N"]:
        return self.active[:, 1]

    @cached_property
    def token_weight(self) -> Float[Tensor, " N"] | Float[Tensor, "N K"]:
        return self.flatten(self.weight)

    @cached_property
    def token_target(self) -> Int[Tensor, " N"] | Int[Tensor, "N K"]:
        return self.flatten(self.targets)

    def flatten(self, values: Tensor) -> Tensor:
        """[R, T, …] → [N, …] over the active tokens."""
        if values.shape[:2] != self.inputs.shape:
            raise SignalError(f"expected [R, T] = {tuple(self.inputs.shape)} in front, got {tuple(values.shape)}.")
        return values[self.row, self.position]

    def per_token(self, values: Float[Tensor, " R"]) -> Float[Tensor, " N"]:
        """One value a row → one value an active token."""
        if tuple(values.shape) != (len(self),):
            raise SignalError(f"expected one value for each of {len(self)} rows, got shape {tuple(values.shape)}.")
        return values[self.row]

    def __len__(self) -> int:
        return self.inputs.shape[0]

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def has_role(self, roles: Sequence[Role]) -> Bool[Tensor, " R"]:
        return torch.tensor([r in roles for r in self.role], device=self.device)

    def counts(self, which: Sequence[Role] | Bool[Tensor, " N"] = ROLES) -> Counts:
        """Denominators over this batch, for the rows of these roles or for these tokens."""
        mine = which if isinstance(which, Tensor) else self.has_role(which)[self.row]
        weight = self.token_weight if self.token_weight.ndim == 1 else self.token_weight.sum(-1)
        rows = self.row[mine]
        longest = int(torch.bincount(rows).max()) if rows.numel() else 0
        return Counts(
            tokens=float(weight[mine].sum(dtype=torch.float64)),
            sequences=int(torch.unique(rows).numel()),
            max_length=self.max_length if self.max_length is not None else longest,
        )

    # --- making and cutting -----------------------------------------------------------------------------------------

    def rows(self, index: Sequence[int] | Int[Tensor, " r"]) -> Batch:
        """The batch of these rows, in this order, signals included; padding that is no longer needed is cut off."""
        rows = torch.as_tensor(index, device=self.device, dtype=torch.long)
        order = self._tokens_of(rows)
        width = max(1, int(self.length[rows].max()))
        changes: dict[str, object] = {
            "role": tuple(self.role[i] for i in rows.tolist()),
            "advantages": None if self.advantages is None else self.advantages[order],
            "behaviour": None if self.behaviour is None else self.behaviour[order],
            "proximal": None if self.proximal is None else self.proximal[order],
            "reference": None if self.reference is None else _cut_reference(self.reference, order),
            "teacher": None if self.teacher is None else _cut_teacher(self.teacher, order, self.active.shape[0]),
        }
        for name in ("inputs", "targets", "weight"):
            changes[name] = getattr(self, name)[rows, :width]
        for name in ("length", "group", "pair", "policy_version", "correct"):
            value = getattr(self, name)
            changes[name] = None if value is None else value[rows]
        return replace(self, **changes)  # type: ignore[arg-type]

    def _tokens_of(self, rows: Int[Tensor, " r"]) -> Int[Tensor, " n"]:
        """Places of these rows' active tokens, row by row in the order given."""
        starts, ends = (
            torch.searchsorted(self.row.contiguous(), rows),
            torch.searchsorted(self.row.contiguous(), rows, right=True),
        )
        spans = [torch.arange(a, b, device=self.device) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return torch.cat(spans)

    def with_signals(self, **signals: object) -> Batch:
        """A copy with these fields replaced, e.g. ``batch.with_signals(reference=…)``."""
        known = {f.name for f in fields(self)}
        if unknown := set(signals) - known:
            raise SignalError(f"unknown signal {sorted(unknown)}; a Batch has {sorted(known)}.")
        return replace(self, **signals)  # type: ignore[arg-type]

    @classmethod
    def from_rows(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        role: Role | Sequence[Role] = "rollout",
        group: Sequence[int] | None = None,
        pair: Sequence[int] | None = None,
        policy_version: Sequence[int] | None = None,
        advantages: Sequence[float] | Sequence[Sequence[float]] | None = None,
        behaviour: Sequence[Sequence[float]] | None = None,
        correct: Sequence[bool] | None = None,
        temperature: float = 1.0,
        max_length: int | None = None,
        pad: int = 0,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Rows of prompt + completion, every completion token active (its end-of-turn token too).

        ``advantages`` is one value a row or one a completion token; ``behaviour`` one a completion token. ``pad``
        only fills space: it may equal the end-of-turn id, since what is supervised is decided by place, never by id.
        """
        R = len(prompts)
        if R == 0 or len(completions) != R:
            raise SignalError(f"need as many completions as prompts and at least one, got {len(completions)} and {R}.")
        for r, (p, c) in enumerate(zip(prompts, completions, strict=True)):
            if not p or not c:
                raise SignalError(
                    f"row {r} has an empty {'prompt' if not p else 'completion'}; drop it before making a batch."
                )
        length = torch.tensor([len(p) + len(c) - 1 for p, c in zip(prompts, completions, strict=True)])
        T = int(length.max())
        inputs = torch.full((R, T), pad, dtype=torch.long)
        targets = torch.full((R, T), pad, dtype=torch.long)
        weight = torch.zeros(R, T)
        for r, (p, c) in enumerate(zip(prompts, completions, strict=True)):
            tokens = torch.tensor([*p, *c])
            inputs[r, : len(tokens) - 1] = tokens[:-1]
            targets[r, : len(tokens) - 1] = tokens[1:]
            weight[r, len(p) - 1 : len(tokens) - 1] = 1.0
        sizes = [len(c) for c in completions]
        batch = cls(
            inputs=inputs,
            targets=targets,
            weight=weight,
            length=length,
            role=(role,) * R if isinstance(role, str) else tuple(role),
            group=torch.arange(R) if group is None else torch.tensor(list(group)),
            pair=torch.full((R,), -1) if pair is None else torch.tensor(list(pair)),
            policy_version=torch.zeros(R, dtype=torch.long)
            if policy_version is None
            else torch.tensor(list(policy_version)),
            advantages=None if advantages is None else _flat("advantages", advantages, sizes),
            behaviour=None if behaviour is None else _flat("behaviour", behaviour, sizes),
            correct=None if correct is None else torch.tensor(list(correct)),
            temperature=temperature,
            max_length=max_length,
        )
        return batch.to(device)

    def to(self, device: torch.device | str) -> Batch:
        moved: dict[str, Any] = {f.name: _move(getattr(self, f.name), device) for f in fields(self)}
        return replace(self, **moved)


def _flat(name: str, values: Sequence[float] | Sequence[Sequence[float]], sizes: Sequence[int]) -> Float[Tensor, " N"]:
    if len(values) != len(sizes):
        raise SignalError(f"{name} has {len(values)} rows, the batch has {len(sizes)}.")
    flat: list[float] = []
    for r, (value, size) in enumerate(zip(values, sizes, strict=True)):
        row = [float(value)] * size if isinstance(value, int | float) else [float(v) for v in value]  # type: ignore[attr-defined]
        if len(row) != size:
            raise SignalError(f"{name} of row {r} has {len(row)} values for {size} completion tokens.")
        flat += row
    return torch.tensor(flat)


def _move(value: object, device: torch.device | str) -> object:
    if isinstance(value, Tensor):
        return value.to(device)
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{f: _move(getattr(value, f), device) for f in value.__dataclass_fields__})  # type: ignore[type-var]
    return value


def _cut_reference(reference: Reference, order: Int[Tensor, " n"]) -> Reference:
    return replace(
        reference,
        logprobs=None if reference.logprobs is None else reference.logprobs[order],
        distribution=None if reference.distribution is None else reference.distribution.take(order),
    )


def _cut_teacher(teacher: Teacher, order: Int[Tensor, " n"], total: int) -> Teacher:
    at = torch.arange(total, device=order.device) if teacher.at is None else teacher.at
    place = torch.full((total,), -1, device=order.device)
    place[at] = torch.arange(at.shape[0], device=order.device)
    kept = place[order]
    new_at = (kept >= 0).nonzero()[:, 0]
    own = kept[new_at]
    logprobs = None if teacher.logprobs is None else teacher.logprobs[own]
    return Teacher(teacher.distribution.take(own), new_at, teacher.kind, logprobs)
