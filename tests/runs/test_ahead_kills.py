"""An asynchronous run under many deaths: 100 of its samplers, 20 of its trainer, and a real SIGKILL of a trainer with
its sampler process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from earnest.errors import EarnestError
from earnest.runs import replay, resume
from earnest.runs.errors import RunStopped
from earnest.runs.setup import Setup
from tests.runs.test_ahead import QUIET, Elsewhere, check_record, config_of, pooled, record, trained, weights
from tests.runs.tiny import recipe, tiny_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kills")
    return recipe(place / "recipe.yaml", tiny_folder(place / "tiny"), check=False)


@pytest.mark.parametrize(("steps", "kills", "least"), [(110, 0, 100), (61, 20, 30)], ids=["samplers", "trainer"])
def test_samplers_and_trainers_die(path: Path, tmp_path: Path, steps: int, kills: int, least: int) -> None:
    """Every second request of a sampler ends with its death. The trainer stops ``kills`` times, in the middle of every
    fourth step, and is resumed from its last checkpoint. No batch is trained twice or left out, none is too old, and
    the whole replays bit for bit."""
    settings = [f"steps={steps}", "eval.every=0", "eval.prompts=1", "checkpoint.every=1", "sampler={staleness: 2}"]
    config = config_of(path, tmp_path / "run", *settings)
    deaths = 0
    for session in range(kills + 1):
        setup, members = pooled(config)
        for member in members:
            member.deaths = set(range(3, 1000, 2))
        if session < kills:
            stop_in_step(setup, 4)
            with pytest.raises(RunStopped, match="killed"):
                trained(setup, resumed=session > 0)
        else:
            folder = trained(setup, resumed=session > 0)
        deaths += died(members)
    assert deaths >= least
    assert len(record(folder)) == steps
    check_record(folder, 2)
    assert weights(replay(folder, [f"out={tmp_path / 'again'}"], QUIET).folder) == weights(folder)


def stop_in_step(setup: Setup, number: int) -> None:
    """The engine raises in the middle of its step with this number."""
    engine, inner, done = setup.require_local("a test"), setup.require_local("a test").step, []

    def step(*given: Any, **more: Any) -> Any:
        done.append(1)
        if len(done) == number:
            raise EarnestError("killed")
        return inner(*given, **more)

    engine.step = step  # type: ignore[method-assign]


def died(members: list[Elsewhere]) -> int:
    """How often these samplers died: at their third, fifth, … request."""
    return sum(len([call for call in member.deaths if call <= member.calls]) for member in members)


def test_a_killed_trainer_leaves_no_sampler_and_resumes(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["steps=8", "checkpoint.every=1", "eval.every=0", "threads=1", "sampler={staleness: 1}", f"out={out}"]
    command = [sys.executable, "-m", "earnest.cli", "run", str(path), *words]
    trainer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    while not list(out.glob("checkpoints/step-00000[2-9]")):
        assert trainer.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    samplers = psutil.Process(trainer.pid).children()
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert samplers
    psutil.wait_procs(samplers, timeout=60)
    assert not [p for p in samplers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    folder = resume(out, [], QUIET).folder
    assert len(record(folder)) == 8
    check_record(folder, 1)
    assert weights(replay(folder, [f"out={tmp_path / 'again'}"], QUIET).folder) == weights(folder)
