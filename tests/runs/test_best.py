"""The best checkpoint by a logged number: what is kept, what the run ends with, when it stops, and that it resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from earnest import report
from earnest.config import RunConfig
from earnest.config.loop import BestConfig
from earnest.errors import ConfigError
from earnest.runs import resume, start
from earnest.runs.best import Best
from earnest.runs.errors import Interrupted, RunStopped
from earnest.runs.loop import TrainingLoop
from earnest.runs.measure import measure
from tests.runs.compare import lines, without_clock

Make = Callable[..., RunConfig]
FALLS = (  # weight -1 trains the reward away: the first evaluations are the best ones
    "objective.0.weight=-1", "optimizer.lr=0.05", "check=false", "eval={every: 2, prompts: 8}", "checkpoint.every=4",
    "checkpoint.keep=1", "sampling.prompts_per_step=4",
)  # fmt: skip


def evaluation(step: int, value: float | None, measure: str = "reward", **metrics: float) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "measure": measure, measure: value, "metrics": metrics}


def taken(step: int, **numbers: float) -> dict[str, Any]:
    return {"kind": "step", "step": step, "loss": numbers.pop("loss", None), "metrics": numbers}


def test_the_best_is_the_first_of_equals_after_step_0() -> None:
    best = Best(BestConfig(patience=2))
    values = [(0, 0.9), (2, 0.3), (4, 0.5), (6, 0.5), (8, 0.4)]
    assert [best.add(evaluation(*one)) for one in values] == [False, True, True, False, False]
    assert (best.step, best.value, best.since) == (4, 0.5, 2)
    assert best.ended == "no better heldout in the last 2 evaluations; the best is 0.5 at step 4"
    assert Best(BestConfig(patience=3), [evaluation(*one) for one in values]).ended is None
    soon = Best(BestConfig(patience=1), [evaluation(*one) for one in values[:4]]).ended
    assert soon == "no better heldout in the last evaluation; the best is 0.5 at step 4"


def test_less_is_better_for_losses_and_where_the_recipe_gives_it() -> None:
    losses = [evaluation(n, v, "loss") for n, v in ((1, 2.0), (2, 1.0), (3, 1.5))]
    assert Best(BestConfig(), losses).step == 2
    named = [evaluation(n, 0.0, **{"heldout/perplexity": v}) for n, v in ((1, 2.0), (2, 1.0), (3, 1.5))]
    assert Best(BestConfig(metric="heldout/perplexity"), named).step == 2
    assert Best(BestConfig(metric="heldout/perplexity", mode="max"), named).step == 1


def test_a_number_that_is_not_finite_is_never_the_best() -> None:
    assert Best(BestConfig(), [evaluation(1, float("nan")), evaluation(2, None), evaluation(3, 0.1)]).step == 3


def test_without_any_finite_number_the_reason_has_none() -> None:
    best = Best(BestConfig(metric="heldout", mode="max", patience=1))
    best.add(evaluation(0, None))
    best.add(evaluation(1, None))
    assert best.ended == "no finite heldout in the last evaluation"


def test_a_number_of_the_steps_is_their_mean_since_the_last_evaluation() -> None:
    best = Best(BestConfig(metric="step/entropy", mode="max"))
    for line in (taken(1, entropy=9.0), evaluation(1, 0.0), taken(2, entropy=8.0), taken(3, entropy=11.0)):
        best.add(line)
    assert best.add(evaluation(3, 0.0)) and best.value == 9.5
    assert not best.add(evaluation(4, 0.0)), "no step since the last evaluation"


def test_a_number_that_is_not_logged_or_has_no_direction_is_refused(
    tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    with pytest.raises(ConfigError, match=r"best.mode: whether more step/entropy is better is not known; give max or"):
        make_config("best=step/entropy")
    with pytest.raises(ConfigError, match=r"best: compares the evaluations of a run, and eval.every is 0"):
        make_config("best=heldout", "eval.every=0")
    with pytest.raises(ConfigError, match="best: replicas keep no checkpoints"):
        make_config("best=heldout", "replicas=2", "sync.every=2")
    config = make_config("best={metric: margin}", "check=false", f"out={tmp_path / 'run'}")
    with pytest.raises(RunStopped, match=r"best.metric: the evaluations of this run log no margin; there are heldout"):
        start("test", config, quiet)
    assert not [x for x in lines(tmp_path / "run" / "metrics.jsonl") if x["kind"] == "step"], "found before a step"


def test_the_run_ends_with_the_best_checkpoint_and_stops_early(
    tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    """Adapter, result, report, samples and `earnest eval` are those of the best step; its checkpoint is kept."""
    config = make_config(*FALLS, "best={patience: 2}", "steps=20", f"out={tmp_path / 'run'}")
    done = start("test", config, quiet)
    found = lines(done.folder / "metrics.jsonl")
    evaluations = {x["step"]: x["reward"] for x in found if x["kind"] == "eval"}
    best = max((s for s in evaluations if s), key=lambda s: (evaluations[s], -s))
    last = max(evaluations)
    assert done.best == best < last == best + 4 < 20 and sum(x["step"] == last for x in found) == 2
    assert done.after == evaluations[best] and done.exit_code == 0
    kept = load_file(done.folder / "checkpoints" / f"step-{best:06d}" / "engine" / "tensors.safetensors")
    saved = load_file(done.folder / "adapter" / "adapter_model.safetensors")
    final = load_file(done.folder / "checkpoints" / f"step-{last:06d}" / "engine" / "tensors.safetensors")

    def holds(tensors: dict[str, Any]) -> bool:
        return all(any(t.shape == v.shape and t.equal(v) for t in tensors.values()) for v in saved.values())

    assert holds(kept) and not holds(final)
    header = json.loads((done.folder / "run.json").read_text())
    assert header["status"] == "finished" and header["best"]["step"] == best and "no better heldout" in header["reason"]
    read = report.load(done.folder)
    assert read.change is not None and read.change.after.step == best
    assert f"step {best} by heldout" in (done.folder / "report.html").read_text()
    samples = [x for x in lines(done.folder / "samples.jsonl") if x["phase"] == "after"]
    assert {x["step"] for x in samples} == {best}
    measured = measure(done.folder, ["prompts=8", "samples=4"])
    assert measured.after == pytest.approx(evaluations[best])
    again = resume(done.folder, console=quiet)
    assert again.best == best and [without_clock(x) for x in lines(done.folder / "metrics.jsonl")] == [
        without_clock(x) for x in found
    ]


def test_a_run_that_was_stopped_has_the_same_best_checkpoint(
    tmp_path: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in step 5, after the best evaluation and before the end of its patience."""
    options = (*FALLS, "best={patience: 2}", "steps=20")
    whole = start("a", make_config(*options, f"out={tmp_path / 'a'}"), quiet).folder
    step = TrainingLoop._one_step

    def stop(self: TrainingLoop, number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt
        step(self, number)

    monkeypatch.setattr(TrainingLoop, "_one_step", stop)
    with pytest.raises(Interrupted):
        start("b", make_config(*options, f"out={tmp_path / 'b'}"), quiet)
    monkeypatch.undo()
    resume(tmp_path / "b", console=quiet)
    first, second = ([without_clock(x) for x in lines(f / "metrics.jsonl")] for f in (whole, tmp_path / "b"))
    assert first == second
    for name in ("adapter/adapter_model.safetensors", "samples.jsonl"):
        assert (whole / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    headers = [json.loads((f / "run.json").read_text())["best"] for f in (whole, tmp_path / "b")]
    assert headers[0] == headers[1]
