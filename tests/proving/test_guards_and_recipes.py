"""No false alarm on guarded engines and on the steps of every recipe in fp32, and of quickstart in bf16: one seed here;
bf16 for all and twenty seeds in the nightly target; and what a person sees meanwhile. An experiment has no setting for
its precision."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import earnest as en
import experiments
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
EXPERIMENTS = [name for name in recipes.names() if "experiment" in recipes.read(name)[1]]
SEEDS = {"float32": 0, "bfloat16": 1}  # in `make test`; the nightly target has twenty for each
SMALLER = {"agent": ["sampling.prompts_per_step=4", "sampling.completions_per_prompt=4"]}  # conversations take long
RUNS = [name for name in recipes.names() if name not in EXPERIMENTS]
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


def prove_guarded(engine: en.LocalEngine, batches: list[en.Batch], seed: int, quick: bool) -> None:
    engine.step(batches[2 * seed], LOSS)
    held = [p.detach().clone() for p in engine.parameters]
    verdict = en.prove(engine, LOSS, batches[2 * seed + 1], quick=quick)
    assert verdict.holds, f"seed {seed}: {verdict}"
    assert any(f.subject.startswith("guard") and f.outcome == "holds" for f in verdict.findings)
    assert all(torch.equal(p, q) for p, q in zip(held, engine.parameters, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GUARDS)
def test_every_guard(name: str, dtype: str, make: Make, found: Directions, batches: list[en.Batch]) -> None:
    """The guard acts on the update only, so the quick proof sees all of it."""
    prove_guarded(make(GUARDS[name](found), dtype=dtype), batches, SEEDS[dtype], quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GUARDS)
def test_every_guard_over_seeds(name: str, dtype: str, make: Make, found: Directions, batches: list[en.Batch]) -> None:
    """With the step's own laws, too."""
    for seed in range(20):
        prove_guarded(make(GUARDS[name](found), dtype=dtype), batches, seed, quick=False)


def test_the_recipes_are_all_here() -> None:
    assert {"quickstart", "sft", "prefer"} <= set(RUNS)
    assert set(EXPERIMENTS) == {"hacking", "heal", "heal-smollm2"}


def recipe_cases() -> list[Any]:
    """Every recipe in two dtypes with twenty seeds. `make test` takes one seed, and bf16 for quickstart alone."""
    cases = []
    for name, dtype, seed in itertools.product(RUNS, ("float32", "bfloat16"), range(20)):
        slow = seed != SEEDS[dtype] or (name != "quickstart" and dtype != "float32")
        cases.append(pytest.param(name, dtype, seed, marks=pytest.mark.slow if slow else ()))
    return cases


@pytest.mark.parametrize(("name", "dtype", "seed"), recipe_cases())
def test_every_recipe(name: str, dtype: str, seed: int) -> None:
    """`earnest audit RECIPE`, with a line of progress for every law."""
    text = io.StringIO()
    words = [f"seed={seed}", f"dtype={dtype}", *SMALLER.get(name, [])]
    verdict = check(config.load(name, words)[1], Console(file=text, width=100))
    assert verdict.holds, str(verdict)
    assert text.getvalue().count("law ") >= 15 and "PG-ONPOLICY on-policy" in text.getvalue()


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if (name, seed) == ("hacking", 0) else [pytest.mark.slow])
        for name, seed in itertools.product(("hacking", "heal"), range(20))
    ],
)
def test_every_experiment(name: str, seed: int) -> None:
    """`earnest audit hacking`: the step of every arm; `earnest audit heal`: the first round's, its barrier activated.
    In `make test` heal is audited in small, by its name."""
    verdict = experiments.check(
        recipes.read(name)[1], [f"seed={seed}"], quick=False, console=Console(file=io.StringIO())
    )
    assert verdict.holds, str(verdict)
    if name == "heal":
        assert any(note.startswith("kl_barrier is inactive") for note in verdict.notes)
    else:
        assert any("guard Erase" in f.subject and f.outcome == "holds" for f in verdict.findings)


@pytest.mark.slow
def test_the_large_experiment() -> None:
    verdict = experiments.check(recipes.read("heal-smollm2")[1], [], quick=False, console=Console(file=io.StringIO()))
    assert verdict.holds, str(verdict)


def test_the_command_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = recipe(tmp_path / "recipe.yaml", tiny_folder(tmp_path / "tiny"))
    with pytest.raises(SystemExit) as end:
        main(["audit", str(place), "--json", "--quick"])
    out, err = capsys.readouterr()
    assert end.value.code == 0 and json.loads(out)["holds"]
    assert "law 1/1: GL" in err


def test_an_experiment_is_audited_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["steering.questions=8", "steering.enough=2", "steering.contexts=4"]
    with pytest.raises(SystemExit) as end:
        main(["audit", "heal", *small, "--json", "--quick"])
    out, err = capsys.readouterr()
    found = {f["subject"]: f["measured"] for f in json.loads(out)["findings"]}
    assert end.value.code == 0 and "steering, and keeping what is sane" in err
    assert "inactive at first" in found["term kl_barrier"] and "inactive" not in found["term sft"]


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_an_experiment_can_be_proved_more_than_once(name: str) -> None:
    """A submodule of that name would take the function's place as soon as it is imported."""
    found = experiments.find(name)
    import_module(f"{experiments.EXPERIMENTS[name]}.check")
    assert callable(found.prove) and callable(found.start)
