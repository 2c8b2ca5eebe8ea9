"""Runs side by side: results, differing settings, curves, and mean ± s.d. over seeds."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from earnest.cli import main
from earnest.report import compare
from earnest.report.record import ReportError
from tests.report import folders


def pair(tmp_path: Path, *changes: str) -> list[Path]:
    """Two run folders; ``changes`` are lines of the second one's config that replace lines of the same key."""
    made = []
    for place, own in ((tmp_path / "one", ()), (tmp_path / "two", changes)):
        made.append(folders.make(place))
        text = (place / "config.yaml").read_text()
        for line in own:
            key = line.partition(":")[0]
            text = "".join(f"{line}\n" if t.startswith(f"{key}:") else t for t in text.splitlines(keepends=True))
        (place / "config.yaml").write_text(text)
    return made


def shift(folder: Path, by: float) -> None:
    """Add ``by`` to the result of the run's last evaluation."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    last["reward"] += by
    if last.get("means"):
        last["means"] = [value + by for value in last["means"]]
    folders.write_lines(folder / "metrics.jsonl", lines)


def test_settings_that_differ_are_listed_key_by_key(tmp_path: Path) -> None:
    made = pair(tmp_path, "optimizer: {kind: adamw, lr: 0.01, betas: [0.9, 0.999], eps: 1.0e-08}", "seed: 4")
    for folder in made:
        with (folder / "config.yaml").open("a") as file:
            file.write(f"description: of {folder.name}\n")
    environment = json.loads((made[1] / "environment.json").read_text())
    environment["packages"]["torch"] = "9.9"
    environment["platform"] = "elsewhere"
    folders.write_json(made[1] / "environment.json", environment)
    assert compare.differing(compare.runs_of(made)) == [
        ("optimizer.lr", ["0.001", "0.01"]),
        ("optimizer.weight_decay", ["0.0", "–"]),
        ("seed", ["3", "4"]),
        ("environment.packages.torch", ["2.13.0", "9.9"]),
    ]


def test_the_results_have_a_row_per_run_and_the_difference_to_the_first(tmp_path: Path) -> None:
    made = pair(tmp_path, "steps: 70")
    shift(made[1], 0.25)
    first, second = compare.results(compare.runs_of(made))
    assert [first[0], second[0]] == ["one", "two"] and first[7] == "–" and second[7].startswith("+0.250")
    assert [first[3], second[3]] == ["reward", "reward"], "the measure"
    assert second[5].split(" ±")[0] == f"{float(first[5].split(' ±')[0]) + 0.25:.3f}"


def test_mean_and_sd_over_runs_that_differ_only_in_their_seed(tmp_path: Path) -> None:
    made = pair(tmp_path, "seed: 4")
    shift(made[1], 0.25)
    runs = compare.runs_of(made)
    *_, row = compare.results(runs)
    values = [run.change.after.value for run in runs if run.change is not None and run.change.after.value is not None]
    assert row[0] == "mean ± s.d." and row[2] == "2 seeds"
    assert row[5] == f"{statistics.fmean(values):.3f} ± {0.25 / 2**0.5:.3f}"
    assert row[4].endswith("± 0.000"), "both began alike"
    assert len(compare.results(compare.runs_of(pair(tmp_path / "b", "steps: 70", "seed: 4")))) == 2, "not only the seed"


def test_a_run_that_was_measured_otherwise_is_not_subtracted(tmp_path: Path) -> None:
    made = pair(tmp_path, "seed: 4")
    lines = [json.loads(line) for line in (made[1] / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "eval":
            line["prompts"] = 7
    folders.write_lines(made[1] / "metrics.jsonl", lines)
    assert compare.results(compare.runs_of(made))[1][7] == "measured otherwise"


def test_every_curve_has_one_line_per_run_in_its_colour(tmp_path: Path) -> None:
    runs = compare.runs_of(pair(tmp_path, "seed: 4"))
    large, grid = compare.charts(runs)
    assert [chart.key for chart in large] == ["heldout", "training"]
    for chart in (*large, *grid):
        assert [one.label for one in chart.series] == ["one", "two"] and [one.colour for one in chart.series] == [0, 1]
    titles = {chart.title for chart in grid}
    assert {"gradient norm", "sdpo: loss", "grpo: clip_fraction"} <= titles


def test_a_folder_stands_for_its_runs_and_names_tell_runs_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folders.make(tmp_path / name / "seed-0")
        folders.make(tmp_path / name / "seed-1")
    inside = compare.runs_of([tmp_path / "a"])
    assert compare.labels(inside) == ["seed-0", "seed-1"]
    both = compare.runs_of([tmp_path / "a", tmp_path / "b" / "seed-0"])
    assert compare.labels(both) == ["a/seed-0", "a/seed-1", "b/seed-0"]
    with pytest.raises(ReportError, match="give two or more run folders"):
        compare.runs_of([tmp_path / "b" / "seed-0"])
    with pytest.raises(ReportError, match="there is no such folder"):
        compare.runs_of([tmp_path / "nowhere", tmp_path / "b" / "seed-0"])


def test_the_command_writes_one_page_that_loads_nothing_and_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = pair(tmp_path, "seed: <4>")
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, made), "--out", str(tmp_path / "page.html")])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "measure" in said and "vs. first" in said and "mean ± s.d." in said and str(tmp_path / "page.html") in said
    page = (tmp_path / "page.html").read_text()
    assert "default-src &#x27;none&#x27;" in page and " src=" not in page and "https://" not in page
    assert "&lt;4&gt;" in page and "<4>" not in page
    assert 'data-chart="heldout"' in page and 'id="settings"' in page


def test_the_terminal_lists_settings_that_differ(tmp_path: Path) -> None:
    shown = io.StringIO()
    Console(file=shown, width=100).print(compare.terminal(compare.runs_of(pair(tmp_path, "steps: 70"))))
    assert "steps" in shown.getvalue().splitlines()[-1] and "70" in shown.getvalue().splitlines()[-1]


def test_a_run_with_a_failed_law_is_not_shown_as_plainly_finished(tmp_path: Path) -> None:
    runs = compare.runs_of([folders.make(tmp_path / "good"), folders.make(tmp_path / "bad", fail=True)])
    shown = io.StringIO()
    Console(file=shown, width=100).print(compare.terminal(runs))
    assert "1 law failed" in " ".join(shown.getvalue().split()).replace("bad (1 law failed)", "1 law failed")
    page = compare.render(runs)
    assert '<span class="badge good">finished</span>' in page
    assert '<span class="badge warn">finished, 1 law failed</span>' in page


def test_the_table_of_seeds_breaks_no_number_in_80_columns(tmp_path: Path) -> None:
    runs = compare.runs_of(pair(tmp_path, "seed: 4"))
    shown = io.StringIO()
    Console(file=shown, width=80).print(compare.terminal(runs, [n for n in compare.NARROW if n != "vs. first"]))
    for row in compare.results(runs):
        assert all(cell in shown.getvalue() for cell in row[4:7]), row
