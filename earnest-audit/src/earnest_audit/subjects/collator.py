"""DATA: A collator, or a data stage, treats each example by itself, in order, and leaves its inputs alone.

order        permuted examples give permuted rows
purity       a row does not depend on the other examples, up to the padding
alignment    all columns of a row come from the same example
inputs       are not written into
again        the same examples give the same batch
documents    a packed batch has one document per example, and it is what the example gives alone
targets      exactly the declared tokens of an example are supervised

Needs: fn(examples) -> a dict of tensors [B, …]; examples; pads: the padding value of each column, where rows are
padded; unpack(batch) -> the documents of a packed batch; targets(example) -> the labels that are supervised
How: The examples are collated as they are, again, in another order, and each alone; real entries are compared.
Exceptions: Packing and sampling stages mix examples by design: rows=False leaves the inputs, the repetition and, with
unpack, the documents.
Detects: labels of the neighbouring row, a column that is sorted by length alone, a collator that appends an end token
to the caller's own list, truncation that depends on the batch, TRL #5075, LLaMA-Factory #10283 and torchtitan #3130
(packed documents), torchtitan #2755 (a mask that is one token too long)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.restore import seeded
from earnest_audit.subjects.base import equal
from earnest_audit.verdict import Finding


@dataclass
class Collator:
    """``fn(examples)`` makes a batch; ``pads`` is column -> padding value: trailing and leading entries of that value
    are not compared. ``rows=False`` where rows are not examples (packing). ``unpack(batch)`` cuts a packed batch into
    its documents, each a dict of columns. ``targets(example)`` are the supervised labels of an example, in order; they
    are in the column ``labels``, where other places have ``ignore``."""

    fn: Callable[[list[Any]], Mapping[str, Any]]
    examples: Sequence[Any]
    pads: Mapping[str, float] = field(default_factory=dict)
    rows: bool = True
    seed: int = 0
    unpack: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] | None = None
    targets: Callable[[Any], Sequence[int]] | None = None
    labels: str = "labels"
    ignore: int = -100

    def check(self) -> Iterator[Finding]:
        given = copy.deepcopy(list(self.examples))
        with seeded(self.seed):
            batch = _tensors(self.fn(given))
        same = equal(given, list(self.examples))
        why = "The stage writes into its examples: the next epoch, and every other stage, gets other data."
        yield LAW.finding("the examples afterwards", "unchanged" if same else "changed", "unchanged", same, why)
        again = self._run(self.examples)
        differ = [k for k in batch if k not in again or not torch.equal(batch[k], again[k])]
        more = ": the same examples and seed give another batch: a state from the last call is still there."
        yield LAW.none("the same examples again", differ, f"{len(differ)} of {len(batch)} columns differ", more)
        if self.unpack is not None:
            yield self._documents(self.unpack)
        if self.targets is not None:
            yield self._supervised(self.targets)
        count = len(self.examples)
        columns = {k: v for k, v in batch.items() if v.ndim > 0 and v.shape[0] == count}
        if not self.rows or count < 2 or not columns:
            yield LAW.not_applicable("rows", "rows are not examples" if columns else "no column has a row per example")
            return
        order = list(range(count))[::-1]  # not a rotation, which a shift by one row would survive
        turned = self._run([self.examples[i] for i in order])
        alone = [self._run([example]) for example in self.examples]
        moved = [k for k in columns if any(not self._same(k, turned, r, batch, i) for r, i in enumerate(order))]
        more = ": permuted examples do not give permuted rows, so columns of one row come from different examples."
        yield LAW.none("permuted examples", moved, f"{len(moved)} of {len(columns)} columns differ", more)
        mixed = [k for k in columns if any(not self._same(k, one, 0, batch, i) for i, one in enumerate(alone))]
        more = (
            ": a row differs from the same example collated alone, padding aside: a statistic of the batch, a "
            "truncation to the shortest, or another example is in it."
        )
        yield LAW.none("each example alone", mixed, f"{len(mixed)} of {len(columns)} columns differ", more)

    def _documents(self, unpack: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]) -> Finding:
        found = [_tensors(document) for document in unpack(self._run(self.examples))]
        alone = [[_tensors(document) for document in unpack(self._run([example]))] for example in self.examples]
        lost = sum(not any(equal(document, other) for other in found) for own in alone for document in own)
        one = len(found) == len(alone) and all(len(own) == 1 for own in alone)
        return LAW.finding(
            "documents", f"{len(found)} documents of {len(alone)} examples, {lost} of them not as they are alone",
            "one per example, each as it is alone", one and lost == 0,
            "A packed example is another document than it is alone: positions go on from the document before it, a "
            "boundary is lost, or the rest of a long example is a document of its own.",
        )  # fmt: skip

    def _supervised(self, targets: Callable[[Any], Sequence[int]]) -> Finding:
        rows = [self._run([example])[self.labels].flatten() for example in self.examples]
        taught = [row[row != self.ignore].tolist() for row in rows]
        other = [str(i) for i, (a, e) in enumerate(zip(taught, self.examples, strict=True)) if a != list(targets(e))]
        more = ": other tokens are supervised than declared: a mask is off by one, or an end or a prompt is in it."
        return LAW.none("supervised tokens", other, f"{len(other)} of {len(taught)} examples differ", more)

    def _run(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        with seeded(self.seed):
            return _tensors(self.fn(copy.deepcopy(list(examples))))

    def _same(self, key: str, a: Mapping[str, Tensor], i: int, b: Mapping[str, Tensor], j: int) -> bool:
        return key in a and torch.equal(self._real(key, a[key][i]), self._real(key, b[key][j]))

    def _real(self, key: str, row: Tensor) -> Tensor:
        """A row without its padding in front and at the end."""
        if key not in self.pads or row.ndim == 0:
            return row
        places = (row != self.pads[key]).reshape(len(row), -1).any(-1).nonzero()[:, 0]
        return row[int(places[0]) : int(places[-1]) + 1] if len(places) else row[:0]


def _tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in batch.items() if isinstance(v, Tensor)}


LAW = Law("DATA", "collator (Collator)", __doc__, Collator.check)
