"""No false alarm on guarded engines and on the step of every recipe that is one run; what a person sees meanwhile.

The recipes that are experiments (hacking, heal) train with the guards and barriers that are proved here, in
``test_own`` and in tests/steering.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import earnest as en
from earnest import config
from earnest.cli import main
from earnest.config import recipes
from earnest.guards import Directions, Erase, Perturb, PerturbRoute, Route, directions_from_gradients
from earnest.runs import check
from tests.guards.conftest import DELTA_S, batches, tiny, triples
from tests.guards.conftest import Make as Make
from tests.guards.conftest import make as make
from tests.runs.tiny import recipe, tiny_folder

assert batches and tiny  # fixtures
LOSS = en.GRPO(clip=0.5)
RUNS = [name for name in recipes.names() if "experiment" not in recipes.read(name)[1]]
GUARDS: dict[str, Callable[[Directions], Any]] = {
    "erase": Erase,
    "route": Route,
    "route at the gradient": lambda d: Route(d, at="gradient"),
    "perturb": lambda d: Perturb(d, seed=3),
    "perturb and route": lambda d: PerturbRoute(d, seed=3),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Directions:
    policy = en.load(tiny_folder(tmp_path_factory.mktemp("directions") / "tiny"))
    adapter = en.attach(policy, en.AntiPaSTO(**DELTA_S), targets=("q_proj", "v_proj"), seed=0)
    return directions_from_gradients(en.LocalEngine(policy, adapter), triples(), en.GRPO(), top=3)


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "full"])
@pytest.mark.parametrize("name", GUARDS)
def test_every_guard(name: str, full: bool, make: Make, found: Directions, batches: list[en.Batch]) -> None:
    """The guard acts on the update only, so the quick proof sees all of it; the full one adds the step's own laws."""
    for seed in (0, 1):
        engine = make(GUARDS[name](found))
        engine.step(batches[2 * seed], LOSS)
        held = [p.detach().clone() for p in engine.parameters]
        verdict = en.prove(engine, LOSS, batches[2 * seed + 1], quick=not full)
        assert verdict.holds, str(verdict)
        assert any(f.subject.startswith("guard") and f.outcome == "holds" for f in verdict.findings)
        assert all(torch.equal(p, q) for p, q in zip(held, engine.parameters, strict=True))


def test_the_recipes_are_all_here() -> None:
    assert {"quickstart", "sft", "prefer"} <= set(RUNS)
    assert set(recipes.names()) - set(RUNS) == {"hacking", "heal", "heal-smollm2"}, "a new recipe: is it proved?"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_every_recipe(name: str, seed: int) -> None:
    """`earnest audit RECIPE`, with a line of progress for every law."""
    text = io.StringIO()
    verdict = check(config.load(name, [f"seed={seed}"])[1], Console(file=text, width=100))
    assert verdict.holds, str(verdict)
    assert text.getvalue().count("law ") >= 15 and "LAW on-policy" in text.getvalue()


def test_the_command_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = recipe(tmp_path / "recipe.yaml", tiny_folder(tmp_path / "tiny"))
    with pytest.raises(SystemExit) as end:
        main(["audit", str(place), "--json", "--quick"])
    out, err = capsys.readouterr()
    assert end.value.code == 0 and json.loads(out)["holds"]
    assert "terms …" in err and "parameters …" in err
