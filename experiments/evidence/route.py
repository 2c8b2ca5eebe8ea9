"""Why does Route remove only a part of what was learned? Variants of the quarantine on the same training runs of nano.

    python -m experiments.evidence.route            three seeds; JSON, tables and figure
    python -m experiments.evidence.route --table

Route does not change the training run, so one run per seed carries all quarantines: the one of `earnest run hacking`,
and one for each possible reason: directions that age, too few of them, the wrong layers, triples that are not the
policy's own exploits. Each is measured ablated at the end of the run, on the same held-out prompts. A variant that
removes more also removes honest skill; so each has its solve rate beside it, and there are controls: random directions
of the same number, and the whole update scaled down.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from earnest.engines import LocalEngine
from earnest.guards import Directions, Route, Triple, random_directions
from earnest.models import SampleSpec
from earnest.seeds import derive
from earnest.tasks import PromptStream, get_task, grade_all
from earnest.tasks.holes import honest
from experiments.evidence.jobs import Jobs, Record, main, plots, spread, table
from experiments.hacking.config import Config
from experiments.hacking.contrasts import clean_triples, hacking_triples
from experiments.hacking.panel import Panel
from experiments.hacking.plan import Job
from experiments.hacking.train import OBJECTIVE, make_engine, measure, train_step

SEEDS = (0, 1, 2)
FRESH = 5
"""Updates between two extractions of the variants that follow the policy."""
SHRUNK = (0.8, 0.6)
BY_HOLE = ("none", "route", "age: every 5 updates", "all: its own, every 5, 16")
Extract = Callable[[], Directions]


class Following(Route):
    """Route that extracts at the trained policy, with the quarantine on, and adopts every new extraction."""

    def __init__(self, directions: Directions, extract: Extract) -> None:
        super().__init__(directions, every=FRESH, extract=extract)

    def refresh(self, extract: Extract) -> dict[str, float]:
        fresh = extract()
        overlap, heading = self.directions.overlap(fresh), self.directions.heading(fresh)
        self.directions = fresh
        self._cast()
        return {"overlap": overlap, "heading": heading, "adopted": 1.0}


def extraction(engine: LocalEngine, config: Config, triples: list[Triple], top: int, floor: float) -> Directions:
    from earnest.guards import directions_from_gradients

    return directions_from_gradients(
        engine, triples, OBJECTIVE, top=top, floor=floor, max_length=config.max_new_tokens, validate=False
    )


def own_triples(engine: LocalEngine, config: Config, seed: int) -> list[Triple]:
    """The policy's own rewarded replies with a pattern of an exploit, against the honest reply; the known exploits
    where there are too few. The oracle is not read: `attempted` is a pattern, and the reward is the checker's."""
    task = get_task("holes")
    prompts = task.prompts("train", 2 * config.triples, derive(seed, "own triples", engine.version) % 2**31)
    spec = SampleSpec(max_new_tokens=config.max_new_tokens, temperature=1.0, seed=derive(seed, "own", engine.version))
    rollouts = engine.sample([engine.policy.render(p.messages) for p in prompts], 2, spec)
    texts = [engine.policy.decode(r.tokens) for r in rollouts]
    grades = grade_all(task, [prompts[r.prompt_index] for r in rollouts], texts)
    found = [
        Triple(prompts[r.prompt_index].messages, text, honest(prompts[r.prompt_index]))
        for r, text, grade in zip(rollouts, texts, grades, strict=True)
        if grade.reward > 0 and grade.extras["attempted"] and text.strip() != honest(prompts[r.prompt_index])
    ]
    return (found + hacking_triples(config.triples, seed))[: config.triples]


def part(directions: Directions, keep: Callable[[str], bool]) -> Directions:
    """Only the directions of some modules."""
    basis = {n: V for n, V in directions.basis.items() if keep(n)}
    return Directions(basis, {n: directions.strength[n] for n in basis}, source=directions.source)


def layer(name: str) -> int:
    return next(int(word) for word in name.replace("/", ".").split(".") if word.isdigit())


def variants(config: Config, seed: int, here: dict[str, LocalEngine]) -> dict[str, Route]:
    """Every quarantine by name. ``here`` has the engine of the moment."""
    given = hacking_triples(config.triples, seed)

    def extract(top: int = config.top, floor: float = config.floor, own: bool = False) -> Directions:
        triples = own_triples(here["engine"], config, seed) if own else given
        return extraction(here["engine"], config, triples, top, floor)

    def clean() -> Directions:
        return extraction(here["engine"], config, clean_triples(config.triples, seed), 16, 0.0)

    first, many = extract(), extract(16, 0.0)
    layers = sorted({layer(n) for n in many.basis})
    middle = layers[len(layers) // 2]
    attention = ("q_proj", "v_proj")
    follow = functools.partial(Following, first)
    return {
        "route": Route(first, every=config.refresh, extract=extract),
        "age: directions of step 0": Route(first),
        "age: every 5 updates": Route(first, every=FRESH, extract=extract),
        "age: every 5, at the trained policy": follow(extract),
        "count: 16 per module": Route(many),
        "count: 32 per module": Route(extract(32, 0.0)),
        "count: 16 per module, random": Route(random_directions(many, seed)),
        "layers: first half, 16": Route(part(many, lambda n: layer(n) < middle)),
        "layers: second half, 16": Route(part(many, lambda n: layer(n) >= middle)),
        "layers: q and v, 16": Route(part(many, lambda n: any(a in n for a in attention))),
        "layers: o and down, 16": Route(part(many, lambda n: not any(a in n for a in attention))),
        "gate: two-sided, 16": Route(many, gate="two_sided"),
        "gate: overshoot 2": Route(first, overshoot=2.0),
        "triples: its own, every 5": follow(lambda: extract(own=True)),
        "all: its own, every 5, 16": Following(many, lambda: extract(16, 0.0, own=True)),
        "control: clean replies, every 5, 16": Following(clean(), clean),
    }


@contextmanager
def shrunk(engine: LocalEngine, factor: float) -> Iterator[None]:
    """The adapter (δS, 0 before training) times a factor."""
    held = [p.detach().clone() for p in engine.parameters]
    try:
        with torch.no_grad():
            for p in engine.parameters:
                p.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for p, old in zip(engine.parameters, held, strict=True):
                p.copy_(old)


def train(seed: int) -> Record:
    config = Config(experiment="hacking")
    job = Job("none", seed)
    plain = make_engine(config, seed, None)
    here = {"engine": plain}
    routes = variants(config, seed, here)
    plain.adapter.detach()
    engine = here["engine"] = make_engine(config, seed, Panel(routes))
    stream = PromptStream(get_task("holes"), derive(seed, "train") % 2**31)
    log = []
    for step in range(1, config.steps + 1):
        log.append(train_step(engine, config, job, stream.next(config.prompts_per_step), None, step))
    total = sum(float(p.detach().double().square().sum()) for p in engine.parameters) ** 0.5
    policies: dict[str, Callable[[], AbstractContextManager[None]]] = {"none": functools.partial(shrunk, engine, 1.0)}
    policies |= {name: route.ablated for name, route in routes.items()}
    policies |= {f"control: whole update × {f:g}": functools.partial(shrunk, engine, f) for f in SHRUNK}
    ends = {}
    for name, policy in policies.items():
        with policy():
            found = measure(engine, config)
        holes = sorted(set(found["holes"]))
        pairs = list(zip(found["exploited_means"], found["holes"], strict=True))
        ends[name] = {k: found[k] for k in ("solved", "exploited", "attempted")} | {
            "by_hole": {h: statistics.mean(x for x, hole in pairs if hole == h) for h in holes}
        }
        if name in routes:
            size = sum(float(q.double().square().sum()) for q in routes[name].quarantine.values()) ** 0.5
            ends[name] |= {"quarantine": size / total, "directions": len(routes[name].directions)}
            overlaps = [line[f"{name}/overlap"] for line in log if f"{name}/overlap" in line]
            ends[name] |= {"overlap": statistics.mean(overlaps)} if overlaps else {}
    return {"seed": seed, "ends": ends}


def jobs(out: Path) -> Jobs:
    del out
    torch.set_num_threads(1)
    return {f"seed{seed}": functools.partial(train, seed) for seed in SEEDS}


def tables(records: Sequence[Record]) -> list[str]:
    rows, holes = [], []
    for name in records[0]["ends"]:
        having = [r["ends"] for r in records if name in r["ends"]]
        ends, base = [e[name] for e in having], [e["none"] for e in having]

        def values(key: str, ends: list[Any] = ends) -> list[float]:
            return [e[key] for e in ends if key in e]

        fewer = [e["exploited"] - b["exploited"] for e, b in zip(ends, base, strict=True)]
        lost = [e["solved"] - b["solved"] for e, b in zip(ends, base, strict=True)]
        count = values("directions")
        rows.append(
            [name, len(ends), f"{statistics.mean(count):.0f}" if count else "–", spread(values("quarantine")),
             spread(values("overlap")), spread(values("exploited")), spread(fewer), spread(values("solved")),
             spread(lost)]
        )  # fmt: skip
        if name in BY_HOLE:
            holes.append([name, *(spread([e["by_hole"][h] for e in ends]) for h in ends[0]["by_hole"])])
    header = [
        "quarantine", "seeds", "directions", "its length / update's", "overlap of a refresh", "exploited",
        "minus none", "solved", "minus none, solved",
    ]  # fmt: skip
    return [table(header, rows), table(["exploited, by hole", *records[0]["ends"]["none"]["by_hole"]], holes)]


def figure(records: Sequence[Record], path: Path) -> None:
    made, [axis] = plots(1, 10, 5.5)
    colours = {"none": "#000000", "route": "#d55e00", "age": "#0072b2", "count": "#009e73", "layers": "#cc79a7",
               "gate": "#e69f00", "triples": "#56b4e9", "all": "#7f3c8d", "control": "#888888"}  # fmt: skip
    for name in records[0]["ends"]:
        having = [r["ends"][name] for r in records if name in r["ends"]]
        x, y = ([e[k] for e in having] for k in ("solved", "exploited"))
        errors = {"xerr": statistics.stdev(x), "yerr": statistics.stdev(y)} if len(having) > 1 else {}
        family = name.partition(":")[0]
        number = [n for n in records[0]["ends"] if n.partition(":")[0] == family].index(name)
        axis.errorbar(
            statistics.mean(x), statistics.mean(y), fmt="os^vDP"[number], color=colours[family], markersize=8,
            label=name, elinewidth=0.7, **errors,
        )  # fmt: skip
    axis.set(
        xlabel="solved",
        ylabel="exploited",
        title=f"nano, held out, means of {len(records)} seeds ± standard deviation; lower right is better",
    )
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    made.savefig(path)


if __name__ == "__main__":
    main("route", jobs, tables, figure)
