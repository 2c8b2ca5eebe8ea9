"""Experiments: recipes of several runs (arms, seeds, controls, rounds) with one folder, one table and one figure.

A recipe's YAML names its experiment (``experiment: hacking``). Each is a module here with

    Config                                     a ``Strict`` model with fields ``experiment``, ``seed`` and ``out``
    start(config, *, full, folder, console)    does what is left to do in ``folder`` and returns the page to look at
    prove(config, *, quick, progress)          the verdict on the steps that it trains with; nothing is written

``start`` is resumable: called again with the same config and folder, it keeps what is finished.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from earnest.errors import ConfigError, nearest

if TYPE_CHECKING:
    from earnest_audit import Verdict

EXPERIMENTS: dict[str, str] = {"hacking": "experiments.hacking", "heal": "experiments.heal"}
"""Name in a recipe → module."""


class Experiment(Protocol):
    """The members of a module of this package."""

    Config: Any

    def start(self, config: Any, *, full: bool, folder: Path, console: Console) -> Path: ...

    def prove(self, config: Any, *, quick: bool, progress: Callable[[str], None]) -> Verdict: ...


def find(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ConfigError(f"experiment {name!r} is unknown: {nearest(name, EXPERIMENTS)}")
    module: Any = import_module(EXPERIMENTS[name])
    return module


def check(data: dict[str, Any], overrides: list[str], *, quick: bool, console: Console) -> Verdict:
    """Prove the steps of an experiment without training it."""
    from earnest.config.loading import check_mapping
    from earnest.runs.progress import laws_on

    experiment = find(data["experiment"])
    config = check_mapping(experiment.Config, data, overrides)
    with laws_on(console) as progress:
        return experiment.prove(config, quick=quick, progress=progress)


def run(name: str, data: dict[str, Any], overrides: list[str], *, full: bool, resume: bool, console: Console) -> Path:
    """Check the config, write it to the folder, and do what is left to do there."""
    from earnest.config import text
    from earnest.config.loading import check_mapping
    from earnest.runs.folder import default_place, require_free

    experiment = find(data["experiment"])
    config = check_mapping(experiment.Config, data, overrides)
    folder = Path(config.out) if config.out is not None else default_place(name)
    kept = {k: v for k, v in config.model_dump(mode="python").items() if k != "out"} | {"full": full}
    written = folder / "experiment.yaml"
    if resume and written.exists():
        before = text.parse_file(written)
        if changed := [k for k in {**before, **kept} if before.get(k) != kept.get(k)]:
            raise ConfigError(
                f"{', '.join(sorted(changed))}: {folder} was started with other values; repeat them, or change out=."
            )
    elif resume:
        raise ConfigError(f"{folder} has no experiment to resume; leave out --resume, or give its folder as out=DIR.")
    else:
        require_free(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(text.spell(kept))
    return experiment.start(config, full=full, folder=folder, console=console)
