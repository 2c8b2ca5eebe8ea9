"""Where the rows of a batch are: a guess by perturbation, in a step that declares no role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.probe import Probe
from earnest_audit.step import Step, StepError

CLOSE = 1e-3  # gradients this close count as equal
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64)  # fmt: skip
PLAIN = (Tensor, np.ndarray, Mapping, list, tuple, str, int, float)  # their rows are known, or they have none


def editable(tensor: Tensor) -> bool:
    """Whether its entries can be compared, sorted and replaced: not of sparse, nested, complex or rare tensors."""
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.dtype in DTYPES and tensor.numel() > 0


def check_batch(batch: Mapping[str, Any]) -> None:
    """Raise where an entry cannot be read twice, or has no rows that could be edited."""
    for key, value in batch.items() if isinstance(batch, Mapping) else ():
        if isinstance(value, Iterator):
            raise StepError(
                f"the batch's {key!r} is a {type(value).__name__}, which can be read only once: give a list."
            )
        if isinstance(value, Tensor) and value.is_nested:
            raise StepError(f"the batch's {key!r} is a nested tensor, whose rows cannot be edited: give a padded one.")


def with_guessed_rows(step: Step) -> Step:
    """The step; where its rows may be elsewhere than in the first dimension of every tensor, it is not known whether
    they interact."""
    if step.roles or step.rows_interact is not False:
        return step
    tensors = [v for v in step.batch.values() if isinstance(v, Tensor) and editable(v)]
    sizes = {len(v) for v in tensors if v.ndim and len(v) > 1}
    plain = (v is None or (isinstance(v, PLAIN) and not hasattr(v, "_fields")) for v in step.batch.values())
    known = len(sizes) == 1 and all(plain)
    if known:
        probe = Probe(step)
        with suppress(Exception), probe.open():  # what the step raises, the audit raises again
            known = not rows_elsewhere(probe)
    return step if known else replace(step, rows_interact=None)


def rows_elsewhere(probe: Probe) -> bool:
    """Whether the order of the rows matters, but would not if they were in dimension 1 (time first), or if one vector
    had none (a weight for each class)."""
    step = probe.step
    with suppress(Exception):
        order = torch.arange(step.rows).roll(1)
        if step.rows < 2 or probe.change(edits.take_rows(step, order)) <= CLOSE:
            return False
        return any(probe.change(other) <= CLOSE for other in _others(step, order)) and not probe.random
    return False


def _others(step: Step, order: Tensor) -> Iterator[edits.Batch]:
    tensors = {k: v for k, v in step.batch.items() if isinstance(v, Tensor) and editable(v) and v.ndim}
    widths = [v.shape[1] for v in tensors.values() if v.ndim > 1]
    width = max(set(widths), key=widths.count) if widths else 1
    if width > 1:  # a vector of that length has one entry for each row
        across = {k: v.roll(1, min(v.ndim, 2) - 1) for k, v in tensors.items() if v.shape[min(v.ndim, 2) - 1] == width}
        yield {**step.batch, **across}
    rows = [k for k, v in tensors.items() if len(v) == step.rows]
    for key in (k for k in rows if tensors[k].ndim == 1 and len(rows) > 2):
        yield {**edits.take_rows(step, order), key: tensors[key]}
