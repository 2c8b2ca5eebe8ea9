"""Which keys of a batch are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
