"""IG, reads: which keys of the batch the loss never asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from earnest.audit.law import Law
from earnest.audit.probe import Probe, fresh, without_graph
from earnest.audit.verdict import Finding


class Heard(dict[str, Any]):
    """A batch that remembers what was asked of it. Whoever goes through it, or copies it, asks for everything."""

    def __init__(self, values: Any = ()) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def _all(self) -> None:
        self.asked |= set(dict.keys(self))

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.asked.add(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:
        self._all()
        return super().__iter__()

    def keys(self) -> Any:
        self._all()
        return super().keys()

    def values(self) -> Any:
        self._all()
        return super().values()

    def items(self) -> Any:
        self._all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        self._all()
        return super().copy()

    def __or__(self, other: Any) -> Any:
        self._all()
        return super().__or__(other)


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    others = [k for k, v in step.batch.items() if isinstance(v, Tensor) and k not in step.roles.values()]
    if not others:
        return
    unread = _unread(probe, step.batch, others)
    if unread:
        yield Finding(
            "IG", f"not read: {', '.join(unread)}", "the loss never asks for it", "-", "not applicable",
            "Nothing is declared of this part of the batch and the loss does not read it. Where it should, declare its "
            "role, and the gradient is asked to depend on it.",
        )  # fmt: skip


def _unread(probe: Probe, batch: Mapping[str, Any], keys: list[str]) -> list[str]:
    heard = Heard(fresh(batch))
    probe.cost += 1 / 3
    try:
        with without_graph(probe.step.seed):
            probe.step.loss(probe.step.model, heard, **probe.settings())
    except Exception:
        return []  # some code takes plain dicts only
    return [k for k in keys if k not in heard.asked]


LAW = Law(
    code="IG",
    name="reads",
    sentence="What of the batch is neither declared nor read is said; it is no fault.",
    needs="a batch with tensors that have no role",
    how="One evaluation on a batch that remembers what it is asked for.",
    traps="Passing the whole batch on (**batch) reads everything.",
    caught="masks and positions that are collated and never reach the loss",
    check=check,
    quick=False,
)
