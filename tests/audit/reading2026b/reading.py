"""A second reading by strangers: two more readers who had never seen the audit wrote the cases in ``c`` and ``d`` from
public issues of 2026; ``TASK.md`` is all that they were given, and their files are unchanged.

They were declared as those of ``tests/audit/reading2026``, by a person who had read the documentation of the
declarations and no law. Everything was committed before any case was audited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earnest_audit import Accumulation
from tests.audit.reading2026.base import Reading, boundaries, logps

READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
CORRECTED = {  # declarations that raised by themselves at the first run, and what was corrected before the record
    "c/d15_state_stale_after_resume": "the stream has no state before its first row",
}


def line(batch: Mapping[str, Tensor], *keys: str) -> tuple[dict[str, Tensor], Tensor]:
    """The rows of a batch as one packed row [1, rows·time], and the bounds of its documents."""
    own = batch["documents"] + 1_000_000 * torch.arange(len(batch["documents"]))[:, None]
    return {k: batch[k].reshape(1, -1) for k in keys}, boundaries(own.flatten())


def from_second(now: Tensor) -> Tensor:
    """log π of the next tokens in the width of the ids: 0 at the first token."""
    return torch.cat([torch.zeros_like(now[:, :1]), now], 1)


def of_the_loss(loss: Callable[..., Any]) -> Callable[..., Tensor]:
    """The log-probs of the logits that the model gives inside the loss, in the width of the ids."""

    def logprobs(model: Any, batch: Any) -> Tensor:
        given: list[Tensor] = []
        hook = model.register_forward_hook(lambda module, args, out: given.append(out))
        try:
            loss(model, batch)
        finally:
            hook.remove()
        return from_second(logps(given[0].reshape(*batch["ids"].shape, -1), batch["ids"]))

    return logprobs


def pairs(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows that are all chosen answers and then all rejected ones, as two sides."""
    names = {"ids": "", "loss_mask": "_mask"}
    sides = {f"{s}{end}": t for k, end in names.items() for s, t in zip(SIDES, flat[k].chunk(2), strict=True)}
    return sides | {f"reference_{s}": t for s, t in zip(SIDES, flat["ref_logps"].chunk(2), strict=True)}


SIDES = ("chosen", "rejected")


def unpaired(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reader's form of ``pairs``."""
    keys = {"ids": "{}", "loss_mask": "{}_mask", "ref_logps": "reference_{}"}
    return {k: torch.cat([batch[form.format(s)] for s in SIDES]) for k, form in keys.items()}


def sides(sums: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
    """Sequence log-probs of both sides, from a function of the reader's form."""

    def logprobs(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        chosen, rejected = sums(model, unpaired(batch)).chunk(2)
        return chosen, rejected

    return logprobs


def stacked(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all batches as one batch, padded with 0 to the longest."""
    width = max(b["ids"].shape[1] for b in batches)
    return {
        k: torch.cat([torch.nn.functional.pad(b[k], (0, width - b[k].shape[1])) for b in batches]) for k in batches[0]
    }


def accumulation(fn: Callable[..., Any], given: Any, rows: Mapping[str, Tensor], **declared: Any) -> Accumulation:
    """An update without a clip: the gradients that it leaves, at a rate of 0."""

    def accumulate(model: Any, batches: Sequence[Any]) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        fn(model, torch.optim.SGD(trained, lr=0.0), list(batches))

    return Accumulation(given["model"], accumulate, rows, **declared)


def traced(optimizer: Any, scheduler: Any, total: int) -> list[list[float]]:
    """The rate of every group at every optimizer step; the scheduler is stepped after each."""
    out = []
    for _ in range(total):
        out.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return out


def text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def words(content: str) -> list[int]:
    """The ids of a text: numbers stand for themselves, and a word for one of forty ids."""
    return [int(w) if w.isdigit() else 10 + sum(map(ord, w)) % 40 for w in content.split()]
