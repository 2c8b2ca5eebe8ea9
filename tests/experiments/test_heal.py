"""`earnest run heal`, small: the folder, the table, the figure, the page; and all arms of --full, resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

import experiments
from earnest.config import recipes, text
from earnest.errors import ConfigError
from experiments.heal.arms import all_arms
from experiments.heal.config import HealConfig
from experiments.heal.figure import draw
from experiments.heal.table import COLUMNS, tables

SMALL = [
    "rounds=1",
    "steering.contexts=3",
    "steering.questions=6",
    "steering.enough=2",
    "steering.max_new_tokens=12",
    "healing.steps=2",
    "healing.rows=2",
    "healing.pressure_every=2",
    "eval.prompts=3",
    "eval.probes=3",
    "eval.texts=2",
    "eval.floor=0.01",
]


def go(tmp_path: Path, *more: str, full: bool = False, resume: bool = False) -> Path:
    name, data = recipes.read("heal")
    return experiments.run(
        name, data, [*SMALL, *more, f"out={tmp_path}"], full=full, resume=resume, console=Console(quiet=True)
    )


def test_a_small_loop_leaves_a_page_without_network_requests(tmp_path: Path) -> None:
    page = go(tmp_path / "a")
    text = page.read_text()
    assert "In round 1 the filter" in text and "of the good answers and" in text
    assert page.name == "report.html" and "data:image/png;base64," in text and "http" not in text
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    (arm,) = results["arms"]
    assert arm["over"] == "rmse" and len(arm["runs"][0]["rounds"]) == 1
    assert results["seconds"] > arm["runs"][0]["rounds"][0]["seconds"] > 0
    assert results["prompted"]["system"] == "Be warm." and results["prompted"]["trait"] > results["base"]["trait"]
    shown = tables(results)
    assert "prompted “Be warm.”" in shown and shown.count("\n| rmse | previous | 0.3 |") == 1
    with pytest.raises(ConfigError, match=r"healing: .* started with other values"):
        go(tmp_path / "a", "healing.tau=0.2", resume=True)


def test_full_runs_every_arm_by_name_and_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = ("full.rounds=1", "full.seeds=[0]")
    page = go(tmp_path / "f", *settings, full=True)
    results = json.loads((tmp_path / "f" / "results.json").read_text())
    names = [arm["name"] for arm in results["arms"]]
    assert names == [arm.name for arm in all_arms(0.3, dict.fromkeys(("mean", "rmse", "p95", "max"), 1.0))]
    assert len(names) == 12 and all(len(arm["runs"]) == 1 for arm in results["arms"])
    taus = {arm["name"]: arm["tau"] for arm in results["arms"]}
    assert {taus[n] for n in names if n.endswith("same")} == {0.3}
    assert taus["mean-previous-calibrated"] < taus["rmse-previous-calibrated"] < taus["max-previous-calibrated"]
    for arm in results["arms"]:
        (loop,) = arm["runs"]
        assert (loop["over"], loop["reference"], loop["tau"]) == (arm["over"], arm["reference"], arm["tau"])
        assert loop["rounds"] or loop["stopped"]
    # one arm is lost: only that one is done again, and it comes out the same
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "f").glob("*/seed-0/loop.json")}
    lost = tmp_path / "f" / "rmse-base-same" / "seed-0" / "loop.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    assert go(tmp_path / "f", *settings, full=True, resume=True) == page
    again = json.loads(lost.read_text())
    assert again == before, "from its rounds' own records"
    assert all(p.stat().st_mtime_ns == t for p, t in times.items() if p != lost)


def test_the_table_of_known_numbers() -> None:
    def loop(*traits: float, stopped: str | None = None) -> dict:
        def one(number: int, trait: float) -> dict:
            coherence = (0.8, 0.7, 0.6)[number - 1]
            healed = {"trait": trait, "mass": 0.9, "sense": 0.8, "fluency": 1.0, "coherence": coherence}
            return {
                "round": number,
                "healed": healed,
                "steered": healed,
                "heal": {"firing": 0.25, "pressure": 1.0},
                "vector": {"cosine_first": 0.5},
            }

        return {"seed": 0, "rounds": [one(i + 1, t) for i, t in enumerate(traits)], "stopped": stopped}

    facts = {"trait": 0.5, "mass": 0.9, "fluency": 1.0, "sense": 1.0, "coherence": 0.9, "score": 0.45}
    arm = {"name": "x", "over": "mean", "reference": "base", "taus": "calibrated", "tau": 0.125}
    arm["runs"] = [loop(0.6, 0.9, 0.8), loop(0.7, 0.8, stopped="round 2: …")]
    line = tables({"base": facts, "prompted": facts | {"system": "Be."}, "arms": [arm]}).splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert dict(zip(COLUMNS, cells, strict=True)) == {
        "barrier": "mean",
        "reference": "base",
        "τ": "0.125 (calibrated)",
        "fires": "25%",
        "trait, best": "0.85 ± 0.07",
        "trait, end": "0.80 ± 0.00",
        "mass, end": "0.900 ± 0.000",
        "sense, end": "0.80 ± 0.00",
        "coherence, round 1": "0.80 ± 0.00",
        "coherence, round 2": "0.70 ± 0.00",
        "coherence, least": "0.65 ± 0.07",
        "coherence, end": "0.65 ± 0.07",
        "drift": "0.50 ± 0.00",
        "rounds": "3, 2*",
    }


def test_the_figure_has_a_log_axis_and_a_panel_for_each_choice_of_tau(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    made = json.loads((Path(__file__).parents[2] / "benchmarks/results/heal.json").read_text())
    seen = {}
    kept = plt.close
    try:
        plt.close = lambda figure: seen.update(axes=figure.axes)  # type: ignore[assignment]
        path = draw(made, tmp_path / "heal.png")
    finally:
        plt.close = kept
        plt.close("all")
    assert path.stat().st_size > 10_000 and [ax.get_xscale() for ax in seen["axes"]] == [
        "log",
        "log",
        "linear",
        "linear",
    ]


def test_what_is_refused(tmp_path: Path) -> None:
    for wrong, words in {
        "task=sort": "two poles",
        "steering.contextz=3": "steering.contextz: unknown key; did you mean 'contexts'",
        "healing.over=median": "healing.over: must be .*, got 'median'",
        "eval.floor=0": "eval.floor: must be above 0",
    }.items():
        with pytest.raises(ConfigError, match=words):
            go(tmp_path / "w", wrong)


@pytest.mark.parametrize("recipe", ["heal", "heal-smollm2"])
def test_a_recipe_resolves_to_what_it_spells(recipe: str) -> None:
    """Every default spelt out reads back as the same config: what --resume compares with."""
    from earnest.config.loading import check_mapping

    _, data = recipes.read(recipe)
    config = check_mapping(HealConfig, data)
    again = check_mapping(HealConfig, text.parse(text.spell(config.model_dump(mode="python")), "dump"))
    assert again == config and config.steering["tries"] == 6, "defaults are spelt out"
    assert len(config.poles().high) == 2
