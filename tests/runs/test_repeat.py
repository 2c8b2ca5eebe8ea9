"""`repeat:` one run per seed in one folder. The runs are the usual ones, a stopped one continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from earnest.cli import main
from earnest.config import RunConfig
from earnest.errors import ConfigError
from earnest.runs import repeat, start
from earnest.runs.errors import Interrupted
from earnest.runs.loop import TrainingLoop
from tests.runs.compare import assert_same_run, lines
from tests.runs.tiny import recipe

Make = Callable[..., RunConfig]
SMALL = ("check=false", "steps=2", "eval.every=0")


def test_each_seed_is_the_run_that_it_would_be_alone(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    out = tmp_path / "several"
    found = repeat.start("test", make_config(*SMALL, "seed=3", "repeat=2", f"out={out}"), quiet)
    assert found.seeds == (3, 4) and found.exit_code == 0 and found.page == out / "compare.html"
    alone = start("test", make_config(*SMALL, "seed=4", f"out={tmp_path / 'alone'}"), quiet).folder
    assert_same_run(alone, out / "seed-4", 2)
    assert (alone / "config.yaml").read_bytes() == (out / "seed-4" / "config.yaml").read_bytes()
    quiet.print(found)
    assert "mean ± s.d. 2 seeds" in quiet.file.getvalue()  # type: ignore[attr-defined]


def test_a_stopped_repetition_continues_where_it_was(
    tmp_path: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the second seed's second step: the first seed stays as it is, the second continues, the third runs."""
    config = [make_config(*SMALL, "checkpoint.every=1", "repeat=[5, 1, 9]", f"out={tmp_path / n}") for n in "ab"]
    whole = repeat.start("test", config[0], quiet).folder
    step = TrainingLoop._one_step

    def stop(self: TrainingLoop, number: int) -> None:
        if number == 2 and self.setup.config.seed == 1:
            raise KeyboardInterrupt
        step(self, number)

    monkeypatch.setattr(TrainingLoop, "_one_step", stop)
    with pytest.raises(Interrupted, match=f"continue with: earnest run {tmp_path / 'b'} --resume"):
        repeat.start("test", config[1], quiet)
    monkeypatch.undo()
    first = (tmp_path / "b" / "seed-5" / "run.json").read_bytes()
    assert repeat.is_repeated(tmp_path / "b") and not (tmp_path / "b" / "seed-9").exists()
    (tmp_path / "b" / "seed-9").mkdir()
    (tmp_path / "b" / "seed-9" / "config.yaml").write_text("killed while the folder was being made")
    repeat.resume(tmp_path / "b", console=quiet)
    assert (tmp_path / "b" / "seed-5" / "run.json").read_bytes() == first
    for seed in (5, 1, 9):
        assert_same_run(whole / f"seed-{seed}", tmp_path / "b" / f"seed-{seed}", 2)


def test_the_command_repeats_resumes_and_raises_steps(tmp_path: Path, tiny: Path) -> None:
    out = tmp_path / "several"
    path = recipe(tmp_path / "recipe.yaml", tiny)
    for words in (["run", str(path), *SMALL, "repeat=2", f"out={out}"], ["run", str(out), "--resume", "steps=3"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    for seed in (0, 1):
        steps = [line["step"] for line in lines(out / f"seed-{seed}" / "metrics.jsonl") if line["kind"] == "step"]
        assert steps == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"keeps its seeds \[0, 1\]; leave them out"):
        repeat.resume(out, ["repeat=3"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("repeat=1", "repeat: needs two or more different seeds of 0 or more, got 1"),
        ("repeat=[2, 2]", "repeat: needs two or more different seeds"),
        ("repeat=[-1, 2]", "repeat: needs two or more different seeds"),
        ("repeat=often", "repeat: must be"),
    ],
)
def test_seeds_that_make_no_sense_are_refused(make_config: Make, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(override)


def test_a_mistake_leaves_no_folder(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    config = make_config(*SMALL, "repeat=2", "sampling.max_new_tokens=500", f"out={tmp_path / 'several'}")
    with pytest.raises(ConfigError, match="exceed the context"):
        repeat.start("test", config, quiet)
    assert not (tmp_path / "several").exists()
    with pytest.raises(ConfigError, match="repeat: this starts one run"):
        start("test", config, quiet)


def test_a_seed_that_stalls_does_not_stop_the_others(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    options = ("task=sort", "check=false", "steps=5", "eval.every=0", "on_stall=stop", "repeat=2")
    found = repeat.start("test", make_config(*options, f"out={tmp_path / 'several'}"), quiet)
    assert found.exit_code == 1 and (tmp_path / "several" / "seed-1" / "report.html").exists()


def test_raised_steps_reach_every_seed_after_a_kill(
    tmp_path: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the first seed continues: the next resume, without overrides, raises the steps of all seeds."""
    out = tmp_path / "several"
    repeat.start("test", make_config(*SMALL, "repeat=[0, 1]", f"out={out}"), quiet)

    def killed(*_: object, **__: object) -> None:
        raise SystemExit(137)

    monkeypatch.setattr(repeat.lifecycle, "resume", killed)
    with pytest.raises(SystemExit):
        repeat.resume(out, ["steps=3"], quiet)
    monkeypatch.undo()
    repeat.resume(out, console=quiet)
    assert [len(lines(out / f"seed-{seed}" / "metrics.jsonl")) for seed in (0, 1)] == [5, 5]  # 3 steps, 2 evaluations
