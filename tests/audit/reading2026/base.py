"""A reading by strangers: two readers who had never seen the audit wrote the cases in ``a`` and ``b`` from public
issues of 2026. ``TASK.md`` is all that they were given; their files are unchanged.

Each reader wrote twenty defects beside their fixes (``dNN``) and twenty right but unusual steps (``rNN``). A person who
knows the audit's interface declared each case from its INPUTS, SETTINGS, NOTES and signature, the same way for the
broken and for the right version. A declaration only brings a case into the form of the subject: document boundaries
become the document of each token, dicts of ranks become rows. It states what the case's words state and compares
nothing with values that the case does not have. After the record of the first run, fields that were added to the
subjects were declared too, where the case's words state them; the history of this folder has the first declarations.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from earnest_audit import Accumulation, Ranks, Step, Subject

Thing = Step | Subject
Declare = Callable[[Any, Callable[..., Any]], Thing | Sequence[Thing]]
FAMILIES = {"data": "data stages", "metrics": "metrics over ranks"}


@dataclass(frozen=True)
class Case:
    """One defect and its fix."""

    id: str
    source: str
    family: str
    what: str
    make: Callable[[bool], Thing | Sequence[Thing]]


@dataclass(frozen=True)
class Right:
    """A right step that is unusual."""

    id: str
    family: str
    make: Callable[[], Thing | Sequence[Thing]]


def load(path: Path) -> ModuleType:
    name = "_".join((*path.parts[-3:-1], path.stem))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reading:
    """The cases in the folders of one package, each declared by a function of the case's module and of its broken or
    its right version.

    ``unfit``: case -> why no subject of the audit fits it; such a case is not seen.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: list[Case] = []
        self.right: list[Right] = []
        self.unfit: dict[str, str] = {}

    def path(self, name: str) -> Path:
        (path,) = self.folder.glob(f"{name}_*.py")
        return path

    def declare(self, name: str) -> Callable[[Declare], Declare]:
        """Registers a declaration of the case with this folder and number."""
        path = self.path(name)

        def add(declaration: Declare) -> Declare:
            module: Any = load(path)
            text = " ".join((module.__doc__ or "").split())
            family = FAMILIES.get(module.FAMILY, module.FAMILY)
            case = f"{path.parent.name}/{path.stem}"

            def make(broken: bool) -> Thing | Sequence[Thing]:
                fresh: Any = load(path)
                return declaration(fresh, fresh.broken if broken else fresh.right)

            if path.stem.startswith("r"):
                self.right.append(Right(case, family, partial(make, False)))
            else:
                source = re.search(r"[\w.-]+/[\w.-]+#\d+", text)
                assert source is not None, case
                self.cases.append(Case(case, source[0], family, text.split(". ")[0].rstrip("."), make))
            return declaration

        return add

    def no_subject(self, name: str, why: str) -> None:
        self.declare(name)(lambda module, fn: [])
        path = self.path(name)
        self.unfit[f"{path.parent.name}/{path.stem}"] = why

    def read(self) -> Reading:
        """Loads the declarations in the folder ``declared``, which are the declarers' own files."""
        for path in sorted((self.folder / "declared").glob("*.py")):
            load(path)
        self.sort()
        return self

    def sort(self) -> None:
        self.cases.sort(key=lambda c: c.id)
        self.right.sort(key=lambda r: r.id)


READING = Reading(Path(__file__).parent)
declare, no_subject = READING.declare, READING.no_subject
CORRECTED = {  # declarations that raised by themselves at the first run, and what was corrected before the record
    "b/d14_prompt_mask_off_by_one": "the stage's column is named input_ids and not inputs",
}


def parts(module: Any) -> tuple[Any, dict[str, Any]]:
    """The model and the batch of a loss."""
    batch = module.make(0)
    return batch.pop("model"), batch


def step_of(module: Any, fn: Callable[..., Any], **declared: Any) -> Step:
    """A loss of a case on the model and the batch of its module."""
    model, batch = parts(module)
    return Step(model=model, loss=fn, batch=batch, **declared)


def logps(logits: Tensor, ids: Tensor) -> Tensor:
    """log π of the next tokens, [rows, time - 1]."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def plain_logps(model: Any, batch: Any) -> Tensor:
    return logps(model(batch["ids"]), batch["ids"])


def documents(bounds: Tensor) -> Tensor:
    """[1, time]: the document of each token, from cumulative lengths."""
    return torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())[None]


def boundaries(row: Tensor) -> Tensor:
    """Cumulative lengths, from the document of each token [time]."""
    cuts = (row.diff() != 0).nonzero()[:, 0] + 1
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([len(row)])])


def padded(rows: Sequence[Sequence[float]], pad: float) -> Tensor:
    """Lists of unequal length as one tensor."""
    width = max((len(r) for r in rows), default=0)
    return torch.tensor([[*r, *[pad] * (width - len(r))] for r in rows])


def twinned(
    fn: Callable[..., float],
    single: Callable[..., float],
    ranks: Callable[[list[Tensor]], list[Any]],
    rows: Tensor,
    by_rank: bool = False,
) -> Ranks:
    """A metric over ranks beside the reader's own computation in one process."""
    return Ranks(
        metric=lambda shards: fn(ranks(shards)), rows=rows, single=lambda shards: single(ranks(shards)), by_rank=by_rank
    )


def whole(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all batches as one batch."""
    return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}


def spread_over(m: Any, fn: Callable[..., Any]) -> list[Thing]:
    """An update over ranks and micro-batches: the pieces of the audit are ranks, then micro-batches of one rank."""

    def declared(what: str, spread: Callable[[Any], list[Any]]) -> Thing:
        given = m.make(0)

        def accumulate(model: Any, batches: Sequence[Any]) -> None:
            fn(model, torch.optim.SGD(model.parameters(), lr=0.0), spread(batches))

        rows = whole([micro for rank in given["batches"] for micro in rank])
        return Accumulation(given["model"], accumulate, rows, what=what)

    return [
        declared("ranks", lambda batches: [[b] for b in batches]),
        declared("micro-batches", lambda batches: [list(batches)]),
    ]
