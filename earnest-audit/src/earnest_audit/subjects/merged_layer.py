"""DF-MERGED: Merging once, merging twice and unmerging do not change the layer's output.

Needs: outputs(), merge(); unmerge() for the way back
How: Outputs before and after each call. The tolerance is rounding in their dtype, relative to the largest.
Exceptions: A layer may refuse a second merge. Without unmerge it is left merged.
Detects: candle-lora #26 (a merged layer adds its adapter again)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.subjects.base import outputs, same
from earnest_audit.verdict import Finding


@dataclass
class MergedLayer:
    """``outputs()`` is the output of the layer or model, adapter included; ``merge()`` writes the adapter into the
    weights and ``unmerge()`` takes it out again. Without ``unmerge`` the layer is left merged."""

    outputs: Callable[[], Tensor]
    merge: Callable[[], Any]
    unmerge: Callable[[], Any] | None = None
    tolerance: float | None = None  # none: rounding in the outputs' dtype, relative to the largest

    def check(self) -> Iterator[Finding]:
        before = outputs(self.outputs)
        self.merge()
        once = "The merged layer has another output: it still adds its adapter beside the merged weights, or "
        yield self._row("outputs, merged", before, f"{once}merges with another scale.")
        again = ""
        try:
            self.merge()
        except Exception as error:  # a refusal is as good as doing nothing
            again = f" (refused: {type(error).__name__})"
        twice = "A second merge adds the adapter again: nothing records that it is in the weights."
        yield self._row(f"outputs, merged twice{again}", before, twice)
        if self.unmerge is None:
            yield LAW.not_applicable("outputs, unmerged", "not checked", "Declare unmerge=… and it is checked.")
            return
        self.unmerge()
        back = "Merging and unmerging do not cancel: another scale, a cast, or a flag that is not restored."
        yield self._row("outputs, unmerged", before, back)

    def _row(self, subject: str, before: Tensor, meaning: str) -> Finding:
        return same(LAW, subject, before, outputs(self.outputs), meaning, self.tolerance)


LAW = Law("DF-MERGED", "merged layer (MergedLayer)", __doc__, MergedLayer.check)
