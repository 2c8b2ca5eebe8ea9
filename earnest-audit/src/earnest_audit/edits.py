"""Changed batches that a correct step still accepts: other values, other rows, more padding, other masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from earnest_audit.restore import is_container, rebuilt
from earnest_audit.step import Step

Batch = dict[str, Any]

# Roles whose values are log-probs, of tokens or of whole answers: never above 0.
LOGPROBS = ("behaviour", "proximal", "reference", "reference_chosen", "reference_rejected")
SAMPLERS = ("behaviour", "proximal")
SIDES = ("chosen", "rejected")
# Roles that the gradient must depend on, in the order in which they are tried.
INPUTS = ("advantages", "rewards", *LOGPROBS, "reference_distribution", "teacher", "importance", "weights", "values",
          "returns", "margin")  # fmt: skip
# Those of them with one value per token, which must not matter where the loss is not taken; the others are per row.
PER_TOKEN = tuple(role for role in INPUTS if role not in ("reference_chosen", "reference_rejected", "margin"))


def generator(step: Step, salt: int = 0) -> Generator:
    return Generator().manual_seed(1000 * step.seed + salt)


def noise_like(t: Tensor, rng: Generator) -> Tensor:
    return torch.randn(t.shape, generator=rng).to(t.device, t.dtype if t.is_floating_point() else torch.float32)


def supervised(step: Step, batch: Mapping[str, Any] | None = None) -> Tensor | None:
    """Where the loss is taken [B, T], by the mask or else by the labels; None where neither is declared."""
    batch = batch or step.batch
    if "mask" in step.roles:
        return batch[step.roles["mask"]] != 0
    if "labels" in step.roles:
        return batch[step.roles["labels"]] != step.ignore_index
    return None


def supervised_wide(step: Step) -> Tensor | None:
    """``supervised`` in the ids' width [B, T]; None where it does not stand beside the ids."""
    ids, on = step.value("ids"), supervised(step)
    if ids is None or on is None or ids.ndim != 2 or on.ndim < 2 or on.shape[0] != ids.shape[0]:
        return None
    return widened(on if on.ndim == 2 else on.flatten(2).any(-1), ids.shape[1])


def widened(on: Tensor, width: int) -> Tensor | None:
    """A mask [B, T], or [B, T - 1] of the shifted targets, in the width T; None for another width."""
    gap = width - on.shape[1]
    return torch.nn.functional.pad(on, (gap, 0)) if gap in (0, 1) else None


def perturb(step: Step, batch: Mapping[str, Any], role: str, rng: Generator, where: Tensor | None = None) -> Batch:
    """Change a role's values (at ``where``, by default wherever the loss is taken), non-uniformly and legally."""
    key = step.roles[role]
    old: Tensor = batch[key]
    if where is None:
        where = fit(supervised(step, batch), old)
    noise = noise_like(old, rng)
    if role == "advantages":
        new = advantages_like(step, batch, rng)
    elif role in LOGPROBS or (role == "teacher" and log_like(old)):
        new = (old - 0.6 * noise.abs() * torch.sign(noise_like(old, rng))).clamp(max=-1e-3)
    elif role == "importance":
        new = old * torch.exp(0.5 * noise)
    elif role == "teacher" and probability_like(old):
        new = torch.softmax(old.clamp_min(1e-6).log() + noise, dim=-1)
    elif not old.is_floating_point():
        new = _other_integers(old, role, rng)
    else:
        size = float(old.float().std() if old.numel() > 1 else old.float().abs().mean())
        new = old + noise * (size if 0 < size < torch.inf else 1.0)
    new = new.to(old.dtype)
    return {**batch, key: new if where is None else torch.where(where, new, old)}


def off_policy(step: Step) -> Batch:
    """The batch as a later update has it: ratios on both sides of any clip (which has no effect at ratio 1), a
    reference that differs (a KL's gradient is 0 at the reference), advantages of both signs."""
    batch: Batch = dict(step.batch)
    rng = generator(step, 5)
    for role in (*LOGPROBS, "reference_distribution"):
        if role in step.roles:
            batch = perturb(step, batch, role, rng)
    if "advantages" in step.roles and bool((batch[step.roles["advantages"]] != 0).any()):
        batch = perturb(step, batch, "advantages", rng)
    return batch


def advantages_like(step: Step, batch: Mapping[str, Any], rng: Generator) -> Tensor:
    """Advantages of both signs, none near 0; one value per row where the batch has one per row."""
    old: Tensor = batch[step.roles["advantages"]]
    sign, size = torch.sign(noise_like(old, rng)), 0.3 + noise_like(old, rng).abs()
    spread = sign * (size if old.is_floating_point() else size.ceil())
    on = fit(supervised(step, batch), old)
    if on is not None and old.ndim == 2:
        highest = old.double().masked_fill(~on, -torch.inf).amax(-1, keepdim=True)
        if bool(((old == highest) | ~on).all()):  # constant along every row
            spread = torch.where(on, spread[:, :1], spread)
    drawn = spread if on is None else spread.masked_select(on)
    if bool((drawn > 0).all() | (drawn < 0).all()):  # one sign by chance
        spread[: len(spread) // 2] *= -1
    return spread.to(old.dtype)


def opposite(step: Step, batch: Mapping[str, Any]) -> Batch | None:
    """The batch with every advantage negated, so that what was clipped is not, and the reverse. Where the step makes
    the advantages itself, the rewards are; integers among them are mirrored within their range."""
    key = step.roles.get("advantages", step.roles.get("rewards"))
    if key is None or not isinstance(old := batch[key], Tensor):
        return None
    if old.is_floating_point() or "advantages" in step.roles:
        return {**batch, key: -old}
    whole = old.long()
    return {**batch, key: (whole.max() + whole.min() - whole).to(old.dtype)}


def _other_integers(old: Tensor, role: str, rng: Generator) -> Tensor:
    """A teacher's integers are ids: they are shuffled. Others get 0 or 1 more: the least always 1, the largest never,
    as a loss that takes off the mean would hide the same change of all."""
    flat = old.flatten()
    if role == "teacher":
        return flat[torch.randperm(flat.numel(), generator=rng).to(old.device)].reshape(old.shape)
    more = torch.randint(0, 2, flat.shape, generator=rng).to(old.device)
    if flat.numel() > 1:
        order = flat.long().argsort(stable=True)
        more[order[-1]], more[order[0]] = 0, 1
    more = more.reshape(old.shape)
    return old ^ more.bool() if old.dtype == torch.bool else old + more.to(old.dtype)


def lifted(batch: Mapping[str, Any]) -> Batch:
    """The same numbers in float64."""
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def repeat_rows(step: Step) -> Batch:
    return take_rows(step, torch.arange(step.rows).repeat(2))


def take_rows(step: Step, index: Tensor) -> Batch:
    return rows_of(step.batch, step.rows, index)


def rows_of(batch: Mapping[str, Any], rows: int, index: Tensor) -> Batch:
    """These rows of every tensor, array, list and tuple with one entry per row, at any depth; the rest stays."""
    places = index.tolist()

    def take(value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            return value[places] if value.ndim > 0 and value.shape[0] == rows else value
        if isinstance(value, PackedSequence):
            padded, lengths = pad_packed_sequence(value, batch_first=True)
            return pack_padded_sequence(padded[places], lengths[places], batch_first=True, enforce_sorted=False)
        if isinstance(value, list | tuple) and len(value) == rows and not hasattr(value, "_fields"):
            return type(value)(value[i] for i in places)
        return rebuilt(value, take) if is_container(value) else value

    return {k: take(v) for k, v in batch.items()}


def add_masked_row(step: Step, least: bool = False) -> Batch:
    """One more row in which the loss is taken nowhere: a copy of the one whose undeclared numbers are the largest (or
    ``least``), which change the loss if they enter it beside the mask; of the last where there are none."""
    declared, size = set(step.roles.values()), torch.zeros(step.rows)
    for key, value in step.batch.items():
        floats = isinstance(value, Tensor) and value.is_floating_point() and value.shape[:1] == (step.rows,)
        if floats and key not in declared:
            norm = value.detach().cpu().float().reshape(step.rows, -1).norm(dim=-1)
            size += norm / norm.max().clamp_min(1e-30)
    order = size.argsort(stable=True)
    batch = take_rows(step, torch.cat([torch.arange(step.rows), order[:1] if least else order[-1:]]))
    for key, ignored in _ignored(step).items():
        batch[key] = batch[key].clone()
        batch[key][-1] = ignored
    return batch


def _ignored(step: Step) -> dict[str, int]:
    """Masks and labels of the batch, with the value that takes a place out of the loss."""
    values = {"mask": 0, "labels": step.ignored, **{f"{s}_mask": 0 for s in SIDES}}
    declared = {step.roles[r]: value for r, value in values.items() if r in step.roles and value is not None}
    return declared | dict.fromkeys(step.masks, 0)


def pad(step: Step, side: str = "right", extra: int = 3, keys: Iterable[str] | None = None, new: bool = False) -> Batch:
    """``extra`` columns of padding after (or in front of) every row, in the tensors ``keys`` (by default the first of
    ``readings``). Integers without a role repeat the edge; with ``new`` they are in no row of the batch."""
    keys = readings(step)[0] if keys is None else keys
    zeros = ("attention", *(f"{s}_attention" for s in SIDES))
    fill = _ignored(step) | {step.roles[r]: 0 for r in zeros if r in step.roles}
    if by_attention(step):  # a loss may also recognise padding by its id
        ids, shown = step.roles["ids"], step.roles["attention"]
        fill[ids] = int(step.batch[ids][step.batch[shown] == 0][0])
    batch: Batch = dict(step.batch)
    for key in keys:
        value: Tensor = batch[key]
        edge = value[:, -1:] if side == "right" else value[:, :1]
        tail = edge.expand(-1, extra, *value.shape[2:]).clone()
        empty = value.is_floating_point() or mask_like(step, key, value)
        if key in fill or (empty and key != step.roles.get("positions")):
            tail.fill_(fill.get(key, 0))
        elif new and key in unknown_integers(step):
            tail = value.max() + 1 + torch.arange(tail.numel(), device=value.device).reshape(tail.shape)
        batch[key] = torch.cat([value, tail] if side == "right" else [tail, value], dim=1)
    return batch


def unknown_integers(step: Step) -> list[str]:
    """Tensors of integers that have the rows' width, no role, and are no mask."""
    return [k for k in readings(step)[0] if k not in step.roles.values() and not step.batch[k].is_floating_point()
            and not mask_like(step, k, step.batch[k])]  # fmt: skip


def mask_like(step: Step, key: str, value: Tensor) -> bool:
    """Zeros and ones without a role: a mask that is not declared."""
    return key not in step.roles.values() and bool(((value == 0) | (value == 1)).all())


def by_attention(step: Step) -> bool:
    """Whether only the attention mask shows where the loss may be taken: there is padding, nothing declares where the
    loss is taken, and the padding of every tensor of integers is known."""
    ids, shown = step.value("ids"), step.value("attention")
    if supervised(step) is not None or ids is None or shown is None or ids.shape != shown.shape:
        return False
    return bool((shown == 0).any()) and not unknown_integers(step)


def readings(step: Step) -> list[set[str]]:
    """Which tensors are padded with the rows: ``step.wide``; undeclared, all that have the rows' width or that of a
    narrower signal (an answer beside prompt and answer). As some may have a width by accident, further readings follow:
    the rows' width alone, only what has a role, and of that no attention that is not the ids'."""
    tensors = {k: v for k, v in step.batch.items() if isinstance(v, Tensor) and v.ndim >= 2}
    if step.wide is not None:
        return [tensors.keys() & set(step.wide)]
    declared, widths = set(step.roles.values()), _widths(step)
    ids, shown = step.value("ids"), step.value("attention")
    foreign = {step.roles["attention"]} if ids is not None and shown is not None and shown.shape != ids.shape else set()
    signals = [step.value(r) for r in ("mask", "labels", *PER_TOKEN)] if ids is not None else []
    narrow = {v.shape[1] for v in signals if v is not None and v.ndim == 2 and 1 < v.shape[1] < min(widths, default=0)}
    wide, more = ({k for k, v in tensors.items() if len(v) == step.rows and v.shape[1] in w} for w in (widths, narrow))
    found = [wide | more, wide, wide & declared, wide & (declared - foreign)]
    return [keys for number, keys in enumerate(found) if keys not in found[:number]]


def _widths(step: Step) -> set[int]:
    """The widths of per-token tensors: T, and T - 1 for those that are aligned with the shifted targets."""
    for group in (("ids",), ("mask",), ("labels",), ("attention",), SIDES):
        values = [v for v in map(step.value, group) if v is not None and v.ndim >= 2]
        if values:
            return {int(v.shape[1]) - less for v in values for less in (0, 1)}
    return set()


def in_place(step: Step) -> bool:
    """Whether labels stand where their tokens do, so that the loss shifts them."""
    return labels_are(step, 0)


def ahead(step: Step) -> bool:
    """Whether labels stand where they are predicted: each is the next token."""
    return labels_are(step, 1)


def labels_are(step: Step, shift: int, least: int = 1) -> bool:
    """Whether every label is the token ``shift`` places on."""
    ids, labels = step.value("ids"), step.value("labels")
    if ids is None or labels is None or ids.shape != labels.shape or step.roles["ids"] == step.roles["labels"]:
        return False
    on = (labels >= 0) & taken(step, labels).bool()
    on, target, token = on[:, : labels.shape[1] - shift], labels[:, : labels.shape[1] - shift], ids[:, shift:]
    return int(on.sum()) >= least and bool((target == token)[on].all())


def only(step: Step, batch: Mapping[str, Any], keep: Tensor) -> Batch:
    """The batch in which the loss is taken at ``keep`` [B, T] alone; what is aligned with the shifted targets, and so
    is one narrower, has no first column."""
    changed: Batch = dict(batch)
    for key, ignored in _ignored(step).items():
        old: Tensor = changed[key]
        here = keep[:, -old.shape[1] :].reshape(*old.shape[:2], *[1] * (old.ndim - 2))
        changed[key] = old.masked_fill(~here, ignored)
    return changed


def other_ids(step: Step, ids: Tensor, where: Tensor) -> Tensor:
    """Another id at every one of these places, one that is a target somewhere: never a place holder of an image."""
    on, targets = supervised_wide(step), step.value("labels")
    if targets is None and on is not None and on.shape == ids.shape:
        targets = torch.where(on, ids, -1)
    known = (ids if targets is None else targets).flatten()
    known = known[known >= 0].unique()
    if len(known) < 2:
        known = ids[ids >= 0].unique()
    return torch.where(where, next_of(known, ids), ids)


def next_of(known: Tensor, values: Tensor) -> Tensor:
    """For each value the next one of those that are ``known``, which are sorted."""
    place = torch.searchsorted(known, values.contiguous()).clamp(max=len(known) - 1)
    return known[(place + 1) % len(known)].to(values.dtype)


def begins(documents: Tensor) -> Tensor:
    """Where a document of a packed row begins; not where its row does."""
    other = documents != documents.roll(1, dims=-1)
    other[:, 0] = False
    return other


def even(step: Step) -> Batch | None:
    """The rows that are supervised at all, each at equally many tokens: there means over tokens, over rows and over a
    row's tokens are the same up to a factor. By turns the last and the first tokens of a row, so that a mean down the
    columns is none of them. None where the number is not known."""
    roles = [role for side in SIDES if (role := f"{side}_mask") in step.roles]
    roles = roles or [role for role in ("mask", "labels") if role in step.roles][:1]
    all_on = {r: step.batch[step.roles[r]] != (step.ignore_index if r == "labels" else 0) for r in roles}
    if not all_on or any(on.ndim != 2 for on in all_on.values()):
        return None
    rows = torch.stack([on.any(-1) for on in all_on.values()]).all(0)
    if int(rows.sum()) < 2:
        return None
    least = min(int(on[rows].sum(-1).min()) for on in all_on.values())
    batch = take_rows(step, rows.nonzero()[:, 0])
    for role, whole in all_on.items():
        old, on = batch[step.roles[role]], whole[rows]
        number, last = on.long().cumsum(-1), (torch.arange(len(on), device=on.device) % 2 == 0)[:, None]
        kept = on & torch.where(last, number > number[:, -1:] - least, number <= least)
        here = old.masked_fill(~kept, step.ignore_index) if role == "labels" else kept.to(old.dtype)
        batch[step.roles[role]] = here
    return batch


def fit(where: Tensor | None, values: Tensor | None) -> Tensor | None:
    """The mask in the shape of ``values``, or None where it has another shape (values of whole rows)."""
    if where is None or values is None or values.ndim < 2 or where.shape[0] != values.shape[0]:
        return None
    gap = where.shape[1] - values.shape[1]
    if gap not in (0, 1):
        return None
    where = where[:, gap:]  # values that are one narrower are aligned with the shifted targets
    return where.reshape(*where.shape, *[1] * (values.ndim - where.ndim))


def taken(step: Step, like: Tensor, batch: Mapping[str, Any] | None = None) -> Tensor:
    """1 where the loss is taken, in the shape and dtype of ``like``; everywhere where no mask fits."""
    on = fit(supervised(step, batch), like)
    return torch.ones_like(like) if on is None else on.to(like.dtype).expand_as(like)


def bounds(step: Step, role: str) -> tuple[Tensor, Tensor] | None:
    """Where a role's values surely, and where they perhaps, enter the loss. In a mask as wide as the ids the teacher's
    values of a token may be one position before it."""
    where, value, ids = supervised(step), step.value(role), step.value("ids")
    if (on := fit(where, value)) is None or where is None or value is None:
        return None
    if role != "teacher" or value.ndim < 3 or ids is None or not ids.shape[1] == where.shape[1] == value.shape[1]:
        return on, on
    before = on.roll(-1, dims=1)
    before[:, -1] = False
    return on & before, on | before


def log_like(t: Tensor) -> bool:
    """Log-probs: never above 0, and not all 0."""
    return t.is_floating_point() and bool((t <= 1e-6).all()) and bool((t < 0).any())


def probability_like(t: Tensor) -> bool:
    if not t.is_floating_point() or t.ndim < 2 or not bool((t >= 0).all()):
        return False
    return torch.allclose(t.float().sum(-1), torch.ones_like(t[..., 0], dtype=torch.float32), atol=1e-3)
