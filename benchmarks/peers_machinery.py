"""How pytest-torch is applied to what is no training step: accumulation, resumes, checkpoints, weight sync, merges.

``pt`` is the package ``pytest_torch``, which only its own environment has.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import Accumulation, MergedLayer, Resume, RoundTrip, WeightSync


def accumulates(pt: Any, thing: Accumulation) -> None:
    def make_setup() -> Any:
        model = copy.deepcopy(thing.model)
        return pt.TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def make_step(pieces: int) -> Callable[[Any, Any], Tensor]:
        kept: list[Any] = []

        def step(setup: Any, batch: Any) -> Tensor:
            kept.append(batch)
            if len(kept) == pieces:
                thing.accumulate(setup.model, list(kept))
                kept.clear()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return torch.zeros(())

        return step

    def split(batch: Mapping[str, Tensor], n: int) -> list[dict[str, Tensor]]:
        rows = len(next(iter(batch.values())))
        cuts = [0, *itertools.accumulate(thing.split)] if thing.split else [*range(n), rows]
        return [{k: v[a:b] for k, v in batch.items()} for a, b in itertools.pairwise(cuts)]

    pt.assert_accumulation_equivalent(
        make_setup, dict(thing.batch), make_step, split=split, accumulation_steps=len(thing.split or (1, 2))
    )


class Held(nn.Module):
    """A run as a module whose state is the run's own."""

    def __init__(self, thing: Resume) -> None:
        super().__init__()
        self.thing, self.x = [thing], [thing.make()]
        self.anchor = nn.Parameter(torch.zeros(1))

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:
        return {"state": self.thing[0].state(self.x[0]).detach().clone()}


def resumes(pt: Any, thing: Resume) -> None:
    def make_setup() -> Any:
        held = Held(thing)
        return pt.TrainingSetup(held, torch.optim.SGD([held.anchor], lr=0.0))

    def step(setup: Any, _batch: Any) -> Tensor:
        seen = thing.run(setup.model.x[0], 1)
        return torch.tensor(float(sum(hash(str(s)) % 9973 for s in seen)))

    def load(setup: Any, path: Path) -> None:
        setup.model.x[0] = thing.load(setup.model.x[0], path.parent) or setup.model.x[0]

    pt.assert_resume_equivalent(
        make_setup, [0], step, steps=2 * thing.steps, save=lambda s, path: thing.save(s.model.x[0], path.parent),
        load=load,
    )  # fmt: skip


def survives(pt: Any, thing: RoundTrip) -> None:
    with tempfile.TemporaryDirectory() as folder:
        x, fresh = thing.make(), thing.make()
        thing.perturb(x)
        thing.save(x, Path(folder))
        fresh = thing.load(fresh, Path(folder)) or fresh
        pt.assert_outputs_close(thing.outputs(fresh), thing.outputs(x))


def synced(pt: Any, thing: WeightSync) -> None:
    thing.perturb()
    thing.push()
    pt.assert_outputs_close(thing.sampler(), thing.trainer())


def merged(pt: Any, thing: MergedLayer) -> None:
    before = thing.outputs()
    thing.merge()
    pt.assert_outputs_close(thing.outputs(), before)
