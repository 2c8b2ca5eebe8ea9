"""``repeat:`` the same recipe with several seeds, one run folder each, in one folder:

OUT/repeat.json      the recipe and the seeds
OUT/config.yaml      the config, with ``repeat``
OUT/seed-3/          the run of seed 3, as ``seed=3 out=OUT/seed-3`` would make it
OUT/compare.html     the runs side by side, with mean ± s.d.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from earnest.config import RunConfig, dump, from_mapping
from earnest.config.text import parse_file
from earnest.disk import write_json, write_text
from earnest.errors import ConfigError
from earnest.report import compare
from earnest.runs import lifecycle
from earnest.runs.errors import Interrupted
from earnest.runs.folder import default_place, read_json, require_free

NAME = "repeat.json"


@dataclass(frozen=True)
class Repeated:
    """The runs of all seeds. ``exit_code`` is 1 if the watch stopped one of them."""

    folder: Path
    seeds: tuple[int, ...]
    page: Path
    exit_code: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield ""
        runs = compare.runs_of([place_of(self.folder, seed) for seed in self.seeds])
        columns = [name for name in compare.NARROW if name != "vs. first"]  # no seed is the one to compare with
        yield compare.terminal(runs, columns)
        yield Text(f"{'page':<16} {self.page}", no_wrap=True, overflow="ignore")


def place_of(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}"


def is_repeated(folder: Path) -> bool:
    return (folder / NAME).is_file()


def start(recipe: str, config: RunConfig, console: Console | None = None) -> Repeated:
    """Train every seed, one after the other, in a new folder. A mistake leaves no folder."""
    folder = Path(config.out) if config.out is not None else default_place(recipe)
    require_free(folder)

    def ready() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.yaml", dump(config))
        write_json(folder / NAME, {"recipe": recipe, "seeds": list(config.seeds)})

    return _train(folder, recipe, config, console or Console(), ready=ready)


def resume(folder: Path, overrides: Sequence[str] = (), console: Console | None = None) -> Repeated:
    """Continue: seeds that are finished stay as they are, unless ``steps`` is raised."""
    known = read_json(folder / NAME)
    old, config = (from_mapping(parse_file(folder / "config.yaml"), given) for given in ((), overrides))
    if config.seeds != old.seeds or config.seeds != tuple(known["seeds"]) or config.out is not None:
        raise ConfigError(f"repeat, seed, out: {folder} keeps its seeds {known['seeds']}; leave them out.")
    if overrides:
        write_text(folder / "config.yaml", dump(config))  # first: a resume after a kill goes on with the same settings
    return _train(folder, str(known["recipe"]), config, console or Console(), overrides)


def _train(
    folder: Path,
    recipe: str,
    config: RunConfig,
    console: Console,
    overrides: Sequence[str] = (),
    ready: Callable[[], None] | None = None,
) -> Repeated:
    """``ready`` is called once the first run is checked, before its folder is made."""
    stalled = False
    for number, seed in enumerate(config.seeds, 1):
        place = place_of(folder, seed)
        console.print(f"seed {seed} ({number} of {len(config.seeds)})", style="bold", highlight=False)
        try:
            if (place / "run.json").exists():
                header = read_json(place / "run.json")
                if header.get("status") == "finished" and not overrides and header.get("steps") == config.steps:
                    continue
                raised = [] if header.get("steps") == config.steps or overrides else [f"steps={config.steps}"]
                stalled |= lifecycle.resume(place, [*overrides, *raised], console).stalled
            else:
                shutil.rmtree(place, ignore_errors=True)  # killed while its folder was being made
                one = config.model_copy(update={"seed": seed, "repeat": None, "out": str(place)})
                stalled |= lifecycle.start(recipe, one, console, ready=ready).stalled
        except Interrupted as stop:
            raise Interrupted(f"earnest run {folder} --resume", stop.step, config.steps, stop.signal) from stop
        ready = None
    runs = compare.runs_of([place_of(folder, seed) for seed in config.seeds])
    return Repeated(folder, config.seeds, compare.write(runs, folder / "compare.html"), int(stalled))
