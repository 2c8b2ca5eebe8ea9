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

from earnest_audit import Ranks, Step, Subject

Thing = Step | Subject
Declare = Callable[[Any, Callable[..., Any]], Thing | Sequence[Thing]]
FOLDER = Path(__file__).parent
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


CASES: list[Case] = []
RIGHT: list[Right] = []
CORRECTED = {  # declarations that raised by themselves at the first run, and what was corrected before the record
    "b/d14_prompt_mask_off_by_one": "the stage's column is named input_ids and not inputs",
}
NO_SUBJECT: dict[str, str] = {}  # case -> why no subject of the audit fits it; such a case is not seen


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reading2026_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def declare(name: str) -> Callable[[Declare], Declare]:
    """Registers a declaration: a function of the case's module and of its broken or its right version."""
    (path,) = FOLDER.glob(f"{name}_*.py")

    def add(declaration: Declare) -> Declare:
        module: Any = load(path)
        text = " ".join((module.__doc__ or "").split())
        family = FAMILIES.get(module.FAMILY, module.FAMILY)
        case = f"{path.parent.name}/{path.stem}"

        def make(broken: bool) -> Thing | Sequence[Thing]:
            fresh: Any = load(path)
            return declaration(fresh, fresh.broken if broken else fresh.right)

        if path.stem.startswith("r"):
            RIGHT.append(Right(case, family, partial(make, False)))
        else:
            source = re.search(r"[\w.-]+/[\w.-]+#\d+", text)
            assert source is not None, case
            CASES.append(Case(case, source[0], family, text.split(". ")[0].rstrip("."), make))
        return declaration

    return add


def no_subject(name: str, why: str) -> None:
    declare(name)(lambda module, fn: [])
    (path,) = FOLDER.glob(f"{name}_*.py")
    NO_SUBJECT[f"{path.parent.name}/{path.stem}"] = why


def parts(module: Any) -> tuple[Any, dict[str, Any]]:
    """The model and the batch of a loss."""
    batch = module.make(0)
    return batch.pop("model"), batch


def logps(logits: Tensor, ids: Tensor) -> Tensor:
    """log π of the next tokens, [rows, time - 1]."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


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
