"""``Batch``: rows of tokens and the typed signals that come with them.

Position t of a row predicts ``targets[:, t]``; no other code shifts tokens. Rows are padded on the right, so a
causal model never sees padding and no attention mask is needed. A token is *active* if its weight is not 0; every
per-token quantity after the vocabulary pass is flat over the N active tokens, row by row.

Values are validated once: when a batch is made, or when a signal is added. Parts of a batch and copies on
another device are not validated again, because on a GPU every check of values waits for the device. A signal that was
changed in place is validated again when a term reads it.

Shapes: R rows, T positions, K targets per position, N active tokens, M tokens that a signal covers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from earnest.errors import SignalError
from earnest.signals.distributions import check_logprobs, derived
from earnest.signals.sources import Reference, Teacher

Role = Literal["rollout", "chosen", "rejected", "demonstration"]
ROLES: tuple[Role, ...] = get_args(Role)
Signal = Literal[
    "advantages",
    "behaviour",
    "proximal",
    "reference.logprobs",
    "reference.distribution",
    "teacher",
    "correct",
    "kl_baseline",
]
# determined by the tokens alone
LAYOUT = ("active", "sizes", "lengths", "active_roles", "token_weight", "token_target")
CHECKED: tuple[Signal, ...] = ("advantages", "behaviour", "proximal", "reference.logprobs", "correct", "kl_baseline")
PER_ROW: tuple[Signal, ...] = ("correct", "kl_baseline")  # the others have one value per active token


@dataclass(frozen=True)
class Counts:
    """Divisors of an objective, counted over the whole optimizer batch (and all ranks), not over a part of it."""

    tokens: float
    sequences: int
    max_length: int
    coverage: float = 1.0
    left_out: int = 0


SUMMED = Counts(tokens=1.0, sequences=1, max_length=1)
"""With these counts a mean over tokens is the sum over tokens, which some trainers need."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One optimizer batch. All tensors are on one device; a signal that was not supplied is None.

    ``behaviour`` are the sampler's log-probs, ``proximal`` the trainer's log-probs of the same tokens at sampling time:
    they differ if sampler and trainer are two programs. ``kl_baseline`` is what KTO compares a row's log-ratio with.
    ``estimator`` names the advantage estimator, ``sought`` the roles that were looked for, found or not;
    ``max_length`` is the longest completion that sampling allows; ``truncated`` is True if top-p or top-k truncated the
    sampled distribution.
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
    kl_baseline: Float[Tensor, " R"] | None = None
    temperature: float = 1.0
    max_length: int | None = None
    truncated: bool = False
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
        for name in ("length", "group", "pair", "policy_version"):
            value = getattr(self, name)
            if tuple(value.shape) != (R,):
                raise SignalError(f"Batch.{name} must have shape [{R}], one value per row, got {tuple(value.shape)}.")
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
                f"{int(late.sum())} active tokens lie after the end of their row (first: row "
                f"{int(self.row[late][0])}, "
                f"position {int(self.position[late][0])}); padding must have weight 0."
            )
        self._check_signals()

    def _check_signals(self) -> None:
        for signal in CHECKED:
            owner = "Batch." if "." not in signal else ""
            self.check_signal(signal, owner + signal.replace("reference", "Reference"))
        N = self.active.shape[0]
        reference = None if self.reference is None else self.reference.distribution
        if reference is not None and len(reference) != N:
            raise SignalError(f"the reference covers {len(reference)} tokens, the batch has {N} active ones.")
        if self.teacher is not None and "teacher" not in self._validated:
            at = self.teacher.at
            covered = N if at is None else at.shape[0]
            if len(self.teacher.distribution) != covered:
                raise SignalError(
                    f"the teacher covers {len(self.teacher.distribution)} tokens, the batch has {N} active ones."
                )
            if at is not None and at.numel() and not bool((at[1:] > at[:-1]).all() & (at[0] >= 0) & (at[-1] < N)):
                raise SignalError(
                    f"Teacher.at must be strictly increasing positions below {N}, the number of active tokens."
                )
            self._validated["teacher"] = 0

    @cached_property
    def _validated(self) -> dict[str, int]:
        """The version counter of every signal's tensor when its values were last validated."""
        return {}

    def find(self, signal: Signal) -> object:
        """The signal, or None if the batch does not have it."""
        owner: Any = self
        for part in signal.split("."):
            owner = getattr(owner, part)
            if owner is None:
                return None
        return owner

    def check_signal(self, signal: Signal, name: str) -> None:
        """Validate shape and values of a per-token or per-row signal, unless they have not changed since the last time.
        The error begins with ``name``."""
        value = self.find(signal)
        if not isinstance(value, Tensor) or self._validated.get(signal) == value._version:
            return
        expected = len(self) if signal in PER_ROW else self.active.shape[0]
        if tuple(value.shape) != (expected,):
            what = "one value per row" if signal in PER_ROW else "one value per active token"
            raise SignalError(
                f"{name} must have shape [{expected}], {what}, got {tuple(value.shape)}; nothing is broadcast, so "
                "use Batch.from_rows or batch.flatten to gather a [R, T] tensor."
            )
        if signal == "reference.logprobs":
            check_logprobs(name, value)
        if signal != "correct" and not bool(torch.isfinite(value).all()):
            raise SignalError(f"{name} has {int((~torch.isfinite(value)).sum())} values that are not finite.")
        if signal in ("behaviour", "proximal"):
            check_logprobs(name, value)
        self._validated[signal] = value._version

    @cached_property
    def active(self) -> Int[Tensor, "N 2"]:
        """(row, position) of every active token, row-major; this order is the flat order everywhere."""
        on = self.weight != 0
        return (on if on.ndim == 2 else on.any(-1)).nonzero()

    @cached_property
    def active_roles(self) -> frozenset[Role]:
        """The roles of the rows that have an active token."""
        return frozenset(role for role, size in zip(self.role, self.sizes, strict=True) if size)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of active tokens of every row."""
        return torch.bincount(self.row, minlength=len(self)).tolist()

    @cached_property
    def lengths(self) -> list[int]:
        """``length`` as numbers."""
        return self.length.tolist()

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
        """One value per row → one value per active token."""
        if tuple(values.shape) != (len(self),):
            raise SignalError(f"expected one value for each of {len(self)} rows, got shape {tuple(values.shape)}.")
        return values[self.row]

    def whole_row(self, row: int) -> list[int]:
        """All tokens of a row: its inputs and its last target."""
        size = self.lengths[row]
        return [*self.inputs[row, :size].tolist(), int(self.targets[row, size - 1])]

    def tensors(self) -> list[Tensor]:
        """The targets, and the signals that are plain tensors."""
        found = [self.targets, *(self.find(signal) for signal in CHECKED)]
        return [t for t in found if isinstance(t, Tensor)]

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def __repr__(self) -> str:
        roles = ", ".join(f"{count} {role}" for role, count in Counter(self.role).items())
        made = {"advantages": f"advantages ({self.estimator})"}
        signals = ", ".join(made.get(s, s) for s in get_args(Signal) if self.find(s) is not None)
        return (
            f"Batch({len(self)} rows: {roles}; {self.active.shape[0]} active of {sum(self.lengths)} tokens; "
            f"signals: {signals or 'none'}; temperature {self.temperature:g}, on {self.device})"
        )

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def has_role(self, roles: Sequence[Role]) -> Bool[Tensor, " R"]:
        return torch.tensor([r in roles for r in self.role], device=self.device)

    def counts(self, which: Sequence[Role] | Bool[Tensor, " N"] = ROLES) -> Counts:
        """Denominators over this batch, for the rows of these roles or for these tokens."""
        mine = which if isinstance(which, Tensor) else self.has_role(which)[self.row]
        sizes = torch.zeros(len(self), device=self.device).index_add(0, self.row, mine.float()).tolist()
        return Counts(
            tokens=self.weight_of(mine),
            sequences=sum(size > 0 for size in sizes),
            max_length=self.max_length if self.max_length is not None else int(max(sizes)),
        )

    def weight_of(self, tokens: Bool[Tensor, " N"]) -> float:
        """The sum of these active tokens' weights, also over K targets per position."""
        weight = self.token_weight if self.token_weight.ndim == 1 else self.token_weight.sum(-1)
        return float((weight * tokens).sum(dtype=torch.float64))

    def rows(self, index: Sequence[int] | Int[Tensor, " r"]) -> Batch:
        """The batch of these rows, in this order, with their signals and without padding that is no longer needed."""
        chosen: list[int] = index.tolist() if isinstance(index, Tensor) else list(index)
        if not chosen or not any(self.sizes[r] for r in chosen):
            raise SignalError("the batch has no active token: every weight of these rows is 0.")
        rows = torch.tensor(chosen, device=self.device)
        order = self.tokens_of(chosen)
        width = max(1, *(self.lengths[r] for r in chosen))
        changes: dict[str, object] = {
            "role": tuple(self.role[i] for i in chosen),
            "reference": None if self.reference is None else self.reference.take(order),
            "teacher": None if self.teacher is None else self.teacher.take(order, self.active.shape[0]),
        }
        for name in ("inputs", "targets", "weight"):
            changes[name] = getattr(self, name)[rows, :width]
        places = dict.fromkeys(("length", "group", "pair", "policy_version", *PER_ROW), rows)
        for name, place in (places | dict.fromkeys(("advantages", "behaviour", "proximal"), order)).items():
            value = getattr(self, name)
            changes[name] = None if value is None else value[place]
        made = derived(self, **changes)
        sizes, lengths = [self.sizes[r] for r in chosen], [self.lengths[r] for r in chosen]
        number = torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)], device=self.device)
        made.__dict__.update(active=torch.stack([number, self.position[order]], 1), sizes=sizes, lengths=lengths)
        made._trust(self)
        return made

    def tokens_of(self, rows: Sequence[int]) -> Int[Tensor, " n"]:
        """Indices of these rows' active tokens among all, row by row in the given order."""
        starts = [0, *accumulate(self.sizes)]
        places = [i for r in rows for i in range(starts[r], starts[r + 1])]
        return torch.tensor(places, dtype=torch.long, device=self.device)

    def _trust(self, source: Batch) -> None:
        """Mark as validated what ``source`` has validated: every value here is one of its values."""
        for signal in source._validated:
            value = self.find(signal)  # type: ignore[arg-type]
            if value is not None:
                self._validated[signal] = value._version if isinstance(value, Tensor) else 0

    def with_signals(self, **signals: object) -> Batch:
        """A copy with these fields replaced, e.g. ``batch.with_signals(reference=…)``; only they are validated."""
        known = {f.name for f in fields(self)}
        if unknown := set(signals) - known:
            raise SignalError(f"unknown signal {sorted(unknown)}; a Batch has {sorted(known)}.")
        if not set(signals) <= {*(s.split(".")[0] for s in get_args(Signal)), "estimator", "sought"}:
            return replace(self, **signals)  # type: ignore[arg-type]
        made = derived(self, **signals)
        kept = {name: self.__dict__[name] for name in LAYOUT if name in self.__dict__}
        unchanged = {s: v for s, v in self._validated.items() if s.split(".")[0] not in signals}
        made.__dict__.update(kept, _validated=unchanged)
        made._check_signals()
        return made

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
        weights: Sequence[Sequence[float] | None] | None = None,
        temperature: float = 1.0,
        max_length: int | None = None,
        truncated: bool = False,
        sought: tuple[Role, ...] = (),
        pad: int = 0,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Rows of prompt + completion, every completion token active (its end-of-turn token too). ``weights`` has one
        value per completion token, or None for a row of ones; a token of weight 0 is not active. ``advantages`` has one
        value per row or per active token; ``behaviour`` one per active token. ``pad`` only fills space: it may equal
        the end-of-turn id, because the loss mask depends on the position, not on the id."""
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
            own = weights[r] if weights is not None else None
            if own is not None and len(own) != len(c):
                raise SignalError(f"weights of row {r} has {len(own)} values for {len(c)} completion tokens.")
            weight[r, len(p) - 1 : len(tokens) - 1] = 1.0 if own is None else torch.tensor(own)
        sizes = (weight != 0).sum(1).tolist()
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
            truncated=truncated,
            sought=sought,
        )
        return batch.to(device)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on this device; the same object if it is already there."""
        wanted = torch.device(device)
        if wanted.type == self.device.type and wanted.index in (None, self.device.index):
            return self
        made = derived(self, **{f.name: _move(getattr(self, f.name), device) for f in fields(self)})
        kept = {name: _move(self.__dict__[name], device) for name in LAYOUT if name in self.__dict__}
        made.__dict__.update(kept)
        made._trust(self)
        return made


def _flat(name: str, values: Sequence[float] | Sequence[Sequence[float]], sizes: Sequence[int]) -> Float[Tensor, " N"]:
    if len(values) != len(sizes):
        raise SignalError(f"{name} has {len(values)} rows, the batch has {len(sizes)}.")
    flat: list[float] = []
    for r, (value, size) in enumerate(zip(values, sizes, strict=True)):
        row = [float(value)] * size if isinstance(value, int | float) else [float(v) for v in value]  # type: ignore[attr-defined]
        if len(row) != size:
            raise SignalError(f"{name} of row {r} has {len(row)} values for {size} active tokens.")
        flat += row
    return torch.tensor(flat)


def _move(value: object, device: torch.device | str) -> object:
    if isinstance(value, Tensor):
        return value.to(device)
    if hasattr(value, "__dataclass_fields__"):
        return derived(value, **{f: _move(getattr(value, f), device) for f in value.__dataclass_fields__})
    return value
