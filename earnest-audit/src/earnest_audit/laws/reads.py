"""IG-READS: Lists the tensors of the batch that the loss never reads. Never a failure: the row is "not declared".

Needs: a batch with tensors that have no role
How: One evaluation on a batch that records which keys are read.
Exceptions: Passing the whole batch on (**batch) reads everything.
Detects: masks and positions that are collated and never reach the loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from earnest_audit.law import Law
from earnest_audit.probe import Probe
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


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    others = [k for k, v in step.batch.items() if isinstance(v, Tensor) and k not in step.roles.values()]
    if not others:
        return
    unread = _unread(probe, step.batch, others)
    if unread:
        names = ", ".join(unread)
        yield LAW.finding(
            f"never read: {names}", "the loss never reads it", "it is read, or not in the batch", "not declared",
            f"The loss never reads {names}. Where it should, declare the role, and law IG checks that the gradient "
            "depends on it.",
        )  # fmt: skip


def _unread(probe: Probe, batch: Mapping[str, Any], keys: list[str]) -> list[str]:
    recording = RecordingBatch()

    def loss(model: nn.Module, copied: Mapping[str, Any]) -> Any:
        recording.update(copied)
        return probe.step.loss(model, recording, **probe.settings())

    try:
        probe.forward(loss, batch, graph=False)
    except Exception:
        return []  # some code takes plain dicts only
    return [k for k in keys if k not in recording.accessed]


LAW = Law("IG-READS", "unread inputs", __doc__, check, quick=False, tier="contrib")
