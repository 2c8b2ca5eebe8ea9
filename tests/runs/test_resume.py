"""A run that dies and is resumed is the run that never died."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from earnest import cli
from earnest.config import RunConfig, load_file
from earnest.disk import JsonLines
from earnest.errors import CheckpointError, ConfigError
from earnest.runs import resume, start
from earnest.runs.errors import Interrupted
from earnest.runs.folder import RunFolder
from tests.runs.compare import assert_same_run, lines
from tests.runs.forked import dying
from tests.runs.tiny import recipe

Make = Callable[..., RunConfig]
SETTINGS = ("steps=10", "checkpoint.every=3", "eval.every=4", "updates_per_batch=2")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed. Do not write into it."""
    place = tmp_path_factory.mktemp("whole")
    config = load_file(recipe(place / "r.yaml", tiny), [*SETTINGS, f"out={place / 'run'}"])
    return start("test", config, Console(file=io.StringIO())).folder


def test_kill_and_resume_is_bit_equal(tiny: Path, tmp_path: Path, whole: Path) -> None:
    """SIGKILL gives no chance to tidy up: whatever is on disk must be enough.

    It comes in step 8 and the newest checkpoint is step 6: the lines of 7 and 8 are there and must not come twice.
    """
    killed = tmp_path / "killed"
    words = ["run", str(recipe(tmp_path / "r.yaml", tiny)), *SETTINGS, f"out={killed}"]
    code, said = dying(signal.SIGKILL, 8, tmp_path / "log", *words)
    assert code == -signal.SIGKILL, said
    assert lines(killed / "metrics.jsonl")[-1]["step"] == 8
    assert json.loads((killed / "run.json").read_text())["status"] == "running"
    assert not (killed / "adapter").exists()

    with pytest.raises(SystemExit) as end:
        cli.main(["run", str(killed), "--resume"])
    assert end.value.code == 0
    assert "resumed after step 6" in (killed / "events.log").read_text()
    assert_same_run(whole, killed, 10)
    assert json.loads((killed / "run.json").read_text())["status"] == "finished"


def test_ctrl_c_leaves_a_resumable_folder(tiny: Path, tmp_path: Path, whole: Path, quiet: Console) -> None:
    """The step that was running is finished and saved, so nothing is lost."""
    folder = tmp_path / "stopped"
    words = ["run", str(recipe(tmp_path / "r.yaml", tiny)), *SETTINGS, f"out={folder}"]
    code, said = dying(signal.SIGINT, 4, tmp_path / "log", *words)
    assert code == 130, said
    assert f"earnest run {folder} --resume" in said
    assert "Traceback" not in said
    header = json.loads((folder / "run.json").read_text())
    assert (header["status"], header["steps_done"]) == ("interrupted", 4) and "SIGINT" in header["reason"]
    resume(folder, console=quiet)
    assert "resumed after step 4" in (folder / "events.log").read_text()
    assert_same_run(whole, folder, 10)


def test_a_second_ctrl_c_stops_at_once(
    tmp_path: Path, whole: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts a step in two; what is resumed is the checkpoint before it."""
    append = JsonLines.append

    def impatient(self: JsonLines, record: dict[str, Any]) -> None:
        append(self, record)
        if record.get("kind") == "step" and record["step"] == 5:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(JsonLines, "append", impatient)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts tests in the background ignores it
    folder = tmp_path / "run"
    with pytest.raises(Interrupted, match="stopped after step 3 of 10"):
        start("test", make_config(*SETTINGS, f"out={folder}"), quiet)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finished = resume(folder, console=quiet)
    assert_same_run(whole, folder, 10)
    first, *_, last = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "eval"]
    assert (finished.before, finished.after) == (first["reward"], last["reward"]), (
        "the first session's evaluation counts"
    )


def test_more_steps_later_equal_all_steps_at_once(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    """The final evaluation of the short run is not part of the long one and disappears from its files."""
    whole = start("test", make_config("steps=7", f"out={tmp_path / 'whole'}"), quiet).folder
    parts = start("test", make_config("steps=3", f"out={tmp_path / 'parts'}"), quiet).folder
    resume(parts, ["steps=7"], quiet)
    assert_same_run(whole, parts, 7)
    assert "steps: 7" in (parts / "config.yaml").read_text()


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


TEARS: dict[str, Callable[[Path], None]] = {
    "a flipped bit in the tensors": lambda c: flip_a_byte(c / "engine" / "tensors.safetensors"),
    "half of the tensors": lambda c: os.truncate(c / "engine" / "tensors.safetensors", 100),
    "an edited engine state": lambda c: flip_a_byte(c / "engine" / "meta.json"),
    "no manifest": lambda c: (c / "manifest.json").unlink(),
    "half a manifest": lambda c: os.truncate(c / "manifest.json", 20),
    "no loop state": lambda c: (c / "loop.json").unlink(),
    "an edited loop state": lambda c: flip_a_byte(c / "loop.json"),
    "metrics that end before it": lambda c: os.truncate(c.parent.parent / "metrics.jsonl", length_at(c, 9) + 10),
}


def length_at(checkpoint: Path, step: int) -> int:
    state = json.loads((checkpoint.with_name(f"step-{step:06d}") / "loop.json").read_text())
    return int(state["lengths"]["metrics.jsonl"])


@pytest.mark.parametrize("tear", TEARS)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    tear: str, tmp_path: Path, whole: Path, quiet: Console
) -> None:
    torn = shutil.copytree(whole, tmp_path / "torn")
    TEARS[tear](torn / "checkpoints" / "step-000010")
    resume(torn, console=quiet)
    events = (torn / "events.log").read_text()
    assert "warning checkpoint step-000010 is damaged" in events
    assert "resumed after step 9" in events
    assert_same_run(whole, torn, 10)


def test_all_checkpoints_torn_starts_from_the_beginning(tmp_path: Path, whole: Path, quiet: Console) -> None:
    torn = shutil.copytree(whole, tmp_path / "torn")
    for checkpoint in (torn / "checkpoints").iterdir():
        flip_a_byte(checkpoint / "engine" / "tensors.safetensors")
    resume(torn, console=quiet)
    assert "resumed from the beginning" in (torn / "events.log").read_text()
    assert_same_run(whole, torn, 10)


def test_a_resumed_run_keeps_its_config(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    folder = start("test", make_config(f"out={tmp_path / 'run'}"), quiet).folder
    with pytest.raises(ConfigError, match=r"optimizer\.lr: a resumed run keeps its config"):
        resume(folder, ["optimizer.lr=0.5"], quiet)
    with pytest.raises(ConfigError, match=r"objective\.0\.clip, seed: a resumed run keeps its config"):
        resume(folder, ["objective.0.clip=0.5", "seed=9"], quiet)
    with pytest.raises(ConfigError, match="at least its 4 steps, got 2"):
        resume(folder, ["steps=2"], quiet)
    with pytest.raises(ConfigError, match="out: a resumed run keeps"):
        resume(folder, ["out=elsewhere"], quiet)
    resume(folder, ["optimizer.lr=1e-2"], quiet)  # repeating what it has is fine


def test_a_folder_is_held_by_one_process(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    folder = start("test", make_config("steps=1", f"out={tmp_path / 'run'}"), quiet).folder
    held = RunFolder.open(folder)
    with pytest.raises(CheckpointError, match="in use by another process"):
        resume(folder, console=quiet)
    held.close()
    resume(folder, console=quiet)


def test_another_model_under_the_same_name_is_refused(
    tiny: Path, tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny, tmp_path / "model")
    folder = start("test", make_config("steps=1", f"model={model}", f"out={tmp_path / 'run'}"), quiet).folder
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="have changed since"):
        resume(folder, console=quiet)


@pytest.mark.parametrize(("place", "says"), [("nowhere", "there is no run folder"), (".", "is not a run folder")])
def test_resuming_nothing(place: str, says: str, tmp_path: Path, quiet: Console) -> None:
    with pytest.raises(CheckpointError, match=says):
        resume(tmp_path / place, console=quiet)


SCHEDULED = "optimizer.schedule={kind: cosine, warmup: 0.3, floor: 0.1}"


def test_a_scheduled_run_has_the_rates_of_its_schedule_and_resumes_bit_for_bit(
    tiny: Path, tmp_path: Path, quiet: Console
) -> None:
    given = [*SETTINGS, "check=false", SCHEDULED]
    made = recipe(tmp_path / "r.yaml", tiny)
    start("r", load_file(made, [*given, f"out={tmp_path / 'whole'}"]), quiet)
    found = [line["lr"] for line in lines(tmp_path / "whole" / "metrics.jsonl") if line["kind"] == "step"]
    # Two updates per step, 20 in all, 6 of them warm-up; a line has the rate of its step's last update.
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * (t - 6) / 14)) / 2 for t in range(8, 21, 2)]
    assert found == pytest.approx([1e-2 * share for share in [2 / 6, 4 / 6, 1, *cosine]])
    assert found[-1] == pytest.approx(1e-3)
    half = tmp_path / "half"
    code, said = dying(signal.SIGKILL, 8, tmp_path / "log", "run", str(made), *given, f"out={half}")
    assert code == -signal.SIGKILL, said
    resume(half, (), quiet)
    assert_same_run(half, tmp_path / "whole", 10)


def test_more_steps_change_the_horizon_of_a_schedule_and_warn(tiny: Path, tmp_path: Path, quiet: Console) -> None:
    made = recipe(tmp_path / "r.yaml", tiny)
    for name, schedule, warns in (("run", "linear", True), ("fixed", "{kind: linear, total: 4}", False)):
        place = tmp_path / name
        given = ["steps=4", "check=false", f"optimizer.schedule={schedule}", f"out={place}"]
        start("r", load_file(made, given), quiet)
        resume(place, ("steps=7",), quiet)
        rates = [line["lr"] for line in lines(place / "metrics.jsonl") if line["kind"] == "step"]
        longer = [0.4e-2, 0.25e-2, 0.1e-2] if warns else [0.1e-2] * 3
        assert rates == pytest.approx([1e-2, 0.7e-2, 0.4e-2, 0.1e-2, *longer])
        told = (
            "steps raised from 4 to 7: the linear schedule now extends over 7 steps"
            in (place / "events.log").read_text()
        )
        assert told == warns


def test_a_warm_up_longer_than_the_run_is_refused_before_the_folder_is_made(
    tiny: Path, tmp_path: Path, quiet: Console
) -> None:
    made = recipe(tmp_path / "r.yaml", tiny)
    given = ["steps=4", "optimizer.schedule={kind: linear, warmup: 4}", f"out={tmp_path / 'run'}"]
    with pytest.raises(
        ConfigError, match=r"optimizer\.schedule\.warmup: 4 updates of warm-up do not fit into 4 updates"
    ):
        start("r", load_file(made, given), quiet)
    assert not (tmp_path / "run").exists()
