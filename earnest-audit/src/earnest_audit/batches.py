"""Which keys of a batch are read; and checks of a trainer's batch beside its loss: columns that the loss reads and the
Trainer dropped, and whether the tokens that end answers are supervised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from earnest_audit.verdict import Finding


class RecordingBatch(dict[str, Any]):
    """A batch that records which keys are read. Iterating over it, or copying it, reads all of them."""

    def __init__(self, values: Any = ()) -> None:
        super().__init__(values)
        self.accessed: set[str] = set()


def _recording(name: str, one: bool) -> Callable[..., Any]:
    """A method of dict that records the key that it is called with, or all keys."""

    def method(batch: RecordingBatch, *args: Any) -> Any:
        batch.accessed |= {str(args[0])} if one else set(dict.keys(batch))
        return getattr(dict, name)(batch, *args)

    return method


for _name in ("__getitem__", "get", "pop", "__contains__"):
    setattr(RecordingBatch, _name, _recording(_name, one=True))
for _name in ("__iter__", "keys", "values", "items", "copy", "__or__"):
    setattr(RecordingBatch, _name, _recording(_name, one=False))


def dropped(trainer: Any, inputs: Any, call: Callable[[Any], Any]) -> Iterator[Finding]:
    """Columns of the dataset that ``compute_loss`` reads and ``remove_unused_columns`` removed. ``call`` is the loss of
    such inputs; it is called only where columns were removed."""
    has = getattr(getattr(trainer, "train_dataset", None), "column_names", None)
    kept = getattr(trainer, "_signature_columns", None)
    if not getattr(trainer.args, "remove_unused_columns", False) or not isinstance(has, list) or not kept:
        return
    gone = set(has) - set(kept) - set(inputs)
    if not gone:
        return
    listening = RecordingBatch(inputs)
    try:
        call(listening)
    except Exception:
        return  # a loss that needs its inputs as they are; the laws have had it already
    for name in sorted(gone & listening.accessed):
        yield Finding(
            "IG", f"column {name}", "compute_loss reads it, the dataset has it, the batch has not", "it is in the "
            "batch",
            "not declared",
            f"The Trainer drops columns that the model's forward does not take, {name} among them, and the loss goes "
            "on without. remove_unused_columns=False keeps it (and the collator has to pass it on).",
        )  # fmt: skip


def ends(trainer: Any, inputs: Any) -> Tensor | None:
    """Of rows whose last real token is the end token, after a supervised one: whether it is supervised. Checked only
    where the end token is the padding too: a collator that masks the one masks the other."""
    words = getattr(trainer, "processing_class", None) or getattr(trainer.data_collator, "tokenizer", None)
    end = getattr(words, "eos_token_id", None)
    ids, labels, shown = (inputs.get(key) for key in ("input_ids", "labels", "attention_mask"))
    if end is None or end != getattr(words, "pad_token_id", None):
        return None
    if not all(isinstance(t, Tensor) and t.ndim == 2 and t.shape == ids.shape for t in (ids, labels, shown)):
        return None
    taught = labels != -100
    if ids.shape[1] < 2 or not bool((labels == ids)[taught].all()):
        return None  # labels of another kind
    last = ((shown != 0) * torch.arange(ids.shape[1], device=ids.device)).argmax(-1, keepdim=True).clamp(min=1)
    closes = (ids.gather(1, last) == end) & (shown.gather(1, last) != 0) & taught.gather(1, last - 1)
    found: Tensor = taught.gather(1, last)[closes]
    return found
