"""ADAPTER: A fresh adapter changes nothing where it claims so, leaves the base alone, and can be switched off.

outputs(attach(model)) = outputs(model);  base weights keep their bits;  after training, disabled = the base

Needs: model, attach(model) -> the adapted model, outputs(model); disable(model), a context manager; perturb(model)
How: Outputs before and after attaching; then the trainable parameters are perturbed and the adapter is disabled.
Exceptions: An adapter that changes the model at initialization by design declares identity=False.
Detects: an initialization that is not exact, attaching that rounds or replaces base weights, a disable_adapter() that
leaves a bias or a scale behind, an adapter that trains nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.law import Law
from earnest_audit.restore import perturbation_sizes, put_back
from earnest_audit.subjects.base import gap, largest, outputs, same
from earnest_audit.verdict import Finding


@dataclass
class AdapterStart:
    """``attach(model)`` adapts the model in place or returns another; ``outputs(model)`` are logits of a fixed text.
    ``disable(model)`` is a context manager inside which the adapter is off. ``identity=False`` where the adapter
    changes the outputs at initialization by design."""

    model: nn.Module
    attach: Callable[[nn.Module], nn.Module | None]
    outputs: Callable[[nn.Module], Tensor]
    disable: Callable[[nn.Module], AbstractContextManager[Any]] | None = None
    identity: bool = True

    def check(self) -> Iterator[Finding]:
        before = outputs(self.outputs, self.model)
        base = {id(p): (name, p, p.detach().clone()) for name, p in self.model.named_parameters()}
        adapted = self.attach(self.model) or self.model
        if self.identity:
            why = "The adapter changes the model before any training: its initialization is not the identity."
            yield same(LAW, "at initialization", before, outputs(self.outputs, adapted), why)
        else:
            yield LAW.not_applicable("at initialization", "it changes the outputs by declaration")
        trained = [p for p in adapted.parameters() if p.requires_grad]
        own = [p for p in trained if id(p) not in base]
        names = f"{len(own)} of {len(trained)} trainable parameters are the adapter's"
        why = "Nothing of the adapter is trainable, or base weights are trained with it."
        yield LAW.finding("what is trainable", names, "all, and some", bool(own) and len(own) == len(trained), why)
        with put_back(own):
            yield from self._perturbed(adapted, own, before)
        changed = [name for name, p, old in base.values() if not torch.equal(p.detach(), old)]
        yield LAW.none("base weights", changed, f"{len(changed)} changed", " changed when the adapter was attached.")

    def _perturbed(self, adapted: nn.Module, own: Sequence[Tensor], before: Tensor) -> Iterator[Finding]:
        with torch.no_grad():
            rng = torch.Generator().manual_seed(0)
            for p, size in zip(own, perturbation_sizes(own, 1.0), strict=True):
                p.add_((size * torch.randn(p.shape, generator=rng)).to(p.device, p.dtype))
        moved = largest(gap(outputs(self.outputs, adapted), before))
        why = "Perturbing every parameter of the adapter does not change the outputs: it is not applied."
        yield LAW.finding("perturbed", f"outputs moved by {moved:.2g}", "above 0", moved > 0, why)
        if self.disable is None:
            yield LAW.not_declared("disabled", "disable=lambda model: …, a context manager,")
        else:
            with self.disable(adapted):
                why = "With the adapter disabled the model is not the base: a bias, a scale or a merged weight is left."
                yield same(LAW, "disabled", before, outputs(self.outputs, adapted), why)


LAW = Law("ADAPTER", "adapter at initialization (AdapterStart)", __doc__, AdapterStart.check)
