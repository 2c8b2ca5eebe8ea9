"""A run from its config to its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from rich.console import Console

from earnest import cli, report
from earnest.config import RunConfig
from earnest.config.schema import Strict
from earnest.errors import CheckpointError, EarnestError
from earnest.proving import prove
from earnest.rollouts import demonstrate
from earnest.runs import check, start
from earnest.runs.collect import BatchSource
from earnest.runs.comparison import gain, standard_error
from earnest.runs.errors import RunStopped
from earnest.runs.evaluate import evaluate, heldout
from earnest.runs.loop import probe_batch
from earnest.runs.preflight import preflight
from earnest.runs.progress import Bars
from earnest.runs.setup import build
from earnest.seeds import derive
from earnest.tasks import Grade, Prompt, get_task
from earnest_audit import LawBroken
from tests.runs.compare import lines, without_clock

Make = Callable[..., RunConfig]


def say_nothing(_: str) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path, make_config: Make, quiet: Console) -> Path:
    return start("test", make_config(f"out={tmp_path / 'run'}"), quiet).folder


def test_the_folder_is_what_the_report_reads(folder: Path) -> None:
    run = report.load(folder)
    assert run.gaps == (), "the strict reader finds nothing missing"
    assert run.header.status == "finished" and run.header.steps_done == 4
    assert [s.step for s in run.steps] == [1, 2, 3, 4]
    assert [e.step for e in run.evaluations] == [0, 2, 4]
    assert run.verdict is not None and run.verdict.count("fails") == 0 and run.verdict.count("holds") > 0
    before = [s for s in run.samples if s.phase == "before"]
    after = [s for s in run.samples if s.phase == "after"]
    assert [s.prompt_id for s in before] == [s.prompt_id for s in after] and len(before) == 3
    assert {s.version for s in before} == {0} and {s.version for s in after} == {4}
    assert (folder / "report.html").stat().st_size > 10_000
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and environment["threads"] == 1


def test_the_adapter_is_the_trained_one(folder: Path, tiny: Path) -> None:
    """What is saved for others is what the last checkpoint has, not what it was born as."""
    from safetensors.torch import load_file

    import earnest as en

    policy = en.load(tiny)
    adapter = en.load_adapter(policy, folder / "adapter")
    trained = load_file(folder / "checkpoints/step-000004/engine/tensors.safetensors")
    own = adapter.state_dict()
    assert own and all(torch.equal(own[name], trained[f"adapter.{name}"]) for name in own)
    assert any(value.any() for name, value in own.items() if name.endswith("B"))


def test_the_same_seed_is_the_same_run_and_another_is_not(
    folder: Path, tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    same = start("test", make_config(f"out={tmp_path / 'same'}"), quiet).folder
    other = start("test", make_config("seed=1", f"out={tmp_path / 'other'}"), quiet).folder
    first, second, third = ([without_clock(line) for line in lines(f / "metrics.jsonl")] for f in (folder, same, other))
    assert first == second
    assert first[0]["means"] == third[0]["means"], "every seed is measured on the same questions, before it trained"
    assert [x["reward"] for x in first if x["kind"] == "step"] != [x["reward"] for x in third if x["kind"] == "step"]


def test_neither_the_check_nor_evaluations_touch_the_training(
    folder: Path, tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    bare = start("test", make_config("check=false", "eval.every=0", f"out={tmp_path / 'bare'}"), quiet).folder
    name = "checkpoints/step-000004/engine/tensors.safetensors"
    assert (folder / name).read_bytes() == (bare / name).read_bytes()
    assert "the step was not checked" in (bare / "events.log").read_text()
    assert not (bare / "verdict.json").exists()


def test_micro_batches_change_no_result(folder: Path, tmp_path: Path, make_config: Make, quiet: Console) -> None:
    cut = start("test", make_config("micro_tokens=40", f"out={tmp_path / 'cut'}"), quiet).folder
    for one, two in zip(lines(folder / "metrics.jsonl"), lines(cut / "metrics.jsonl"), strict=True):
        assert one["reward"] == two["reward"]
        if one["kind"] == "step":
            assert two["micro_batches"] > 1 == one["micro_batches"]
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3, abs=1e-6)


def test_two_terms_have_shares_and_a_zero_weight_is_reported(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    objective = "objective=[{kind: grpo}, {kind: dapo, weight: 0.5}, {kind: bnpo, weight: 0}]"
    folder = start("test", make_config(objective, "shares_every=2", f"out={tmp_path / 'run'}"), quiet).folder
    steps = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "step"]
    assert all(set(line["terms"]) == {"grpo", "dapo"} and line["skipped"] == ["bnpo"] for line in steps)
    assert {line["terms"]["grpo"]["share"] for line in steps if line["step"] % 2} == {None}
    measured = [line for line in steps if line["step"] % 2 == 0 and line["grad_norm"] > 0]
    assert measured and all(sum(t["share"] for t in line["terms"].values()) == pytest.approx(1) for line in measured)


def test_updates_per_batch_leaves_the_policy_that_sampled(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    """The second update is off-policy, so the ratio is no longer 1; versions count updates."""
    folder = start("test", make_config("updates_per_batch=3", f"out={tmp_path / 'run'}"), quiet).folder
    steps = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["version"] for line in steps] == [3, 6, 9, 12]
    moved = [line["terms"]["grpo"]["metrics"]["ratio_max"] for line in steps if line["grad_norm"] > 0]
    assert moved and max(moved) > 1.001


# --- what stops a run -------------------------------------------------------------------------------------------------


def test_an_out_folder_in_use_is_refused(folder: Path, tmp_path: Path, make_config: Make, quiet: Console) -> None:
    with pytest.raises(
        CheckpointError, match=r"holds a run; continue it with `earnest run .* --resume`, or choose another"
    ):
        start("test", make_config(f"out={folder}"), quiet)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is not empty; choose another folder"):
        start("test", make_config(f"out={tmp_path / 'mine'}"), quiet)


def test_a_dead_step_is_not_trained(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    """With a learning rate of 0 every curve would look alive and nothing would be learned."""
    with pytest.raises(RunStopped, match=r"(?s)learning rate: 0, expected above 0.*0 changed their bits") as caught:
        start("test", make_config("optimizer.lr=0", f"out={tmp_path / 'run'}"), quiet)
    assert isinstance(caught.value.__cause__, LawBroken)
    assert "No path leads" not in str(caught.value), "the learning rate is the reason, and the only one"
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["holds"] is False and any(c["outcome"] == "fails" and c["detail"] for c in verdict["checks"])
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["status"] == "failed" and "breaks a law" in header["reason"]
    assert not check(make_config("optimizer.lr=0"), quiet).holds


def test_a_loss_that_is_not_finite_stops_with_a_sentence(
    tmp_path: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    from earnest.objectives import GRPO

    reduce, calls = GRPO.reduce, iter(range(1000))
    monkeypatch.setattr(
        GRPO, "reduce", lambda self, view, values: reduce(self, view, values) * (math.nan if next(calls) == 2 else 1)
    )
    with pytest.raises(RunStopped, match="step 3 of 4: grpo: the loss is nan"):
        start("test", make_config("check=false", f"out={tmp_path / 'run'}"), quiet)
    monkeypatch.undo()
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (header["status"], header["steps_done"]) == ("failed", 2) and "nan" in header["reason"]
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
    assert report.load(tmp_path / "run").header.status == "failed"


class Moody:
    """style/volume, whose grader raises on a share of its calls."""

    def __init__(self, every: int) -> None:
        self.task, self.every, self.calls = get_task("style/volume"), every, 0
        self.name, self.description, self.prompts = self.task.name, "", self.task.prompts

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        self.calls += 1
        if self.calls % self.every == 0:
            raise KeyError("no such column")
        return self.task.grade(prompt, completion)


def test_graders_that_raise_are_counted_and_stop_the_run_past_the_share(
    tmp_path: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    import earnest.runs.setup

    monkeypatch.setattr(earnest.runs.setup, "get_task", lambda *_: Moody(4))
    folder = start("test", make_config("max_grader_errors=0.5", f"out={tmp_path / 'run'}"), quiet).folder
    steps = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "step"]
    assert all(line["metrics"]["grader_errors"] == 2 for line in steps)
    with pytest.raises(RunStopped, match=r"raised on 2 of 8 completions.*KeyError.*on prompt style/volume"):
        start("test", make_config(f"out={tmp_path / 'stopped'}"), quiet)
    assert json.loads((tmp_path / "stopped" / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("task=srot", "task 'srot' is unknown"),
        ("model=/no/such/folder", "/no/such/folder"),
        ("device=tpu9", "tpu9"),
        ("adapter.targets=[q_prj]", "q_prj"),
        ("adapter.layers=[7]", "layer 7 does not exist"),
        ("sampling.completions_per_prompt=1", "at least 2, got 1"),
        ("objective=[{kind: sft}]", "no right answers to demonstrate"),
        ("objective=[{kind: grpo, weight: 0}]", "no term has a weight other than 0"),
        (
            "objective=[{kind: sdpo}]; engine.estimator=sampled; sampling.temperature=0.7",
            "sampled at temperature 0.7 .* sample at temperature 1",
        ),
        (
            "sampling.max_new_tokens=500",
            r"sampling.max_new_tokens: 500 tokens after the \d+ of prompt .* set at most \d+",
        ),
        pytest.param(
            "task=reasoning_gym/knights_knaves",
            r"task: prompt .* has \d+ tokens, and the context of .* holds 128",
            marks=pytest.mark.integration,
        ),
    ],
)
@pytest.mark.parametrize("check", ["true", "false"])
def test_a_mistake_leaves_no_folder(
    override: str, says: str, check: str, tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    """Whatever can be checked is checked before the folder is made, so that the corrected command may use it."""
    with pytest.raises(EarnestError, match=says) as caught:
        start("test", make_config(*override.split("; "), f"check={check}", f"out={tmp_path / 'run'}"), quiet)
    assert getattr(caught.value, "exit_code", 2) == 2 and not (tmp_path / "run").exists()


def test_a_completion_may_fill_the_context(make_config: Make) -> None:
    """Its last token is never an input, so it needs no place."""
    setup = build(make_config(), lambda _: None)
    assert setup.task is not None and setup.policy.positions is not None
    stream = BatchSource(setup).stream
    assert stream is not None
    count = setup.config.steps * setup.config.sampling.prompts_per_step
    prompts = [*heldout(setup, setup.task), *stream.next(count)]
    most = setup.policy.positions + 1 - max(len(setup.policy.render(p.messages)) for p in prompts)
    preflight(replace(setup, config=make_config(f"sampling.max_new_tokens={most}")))
    with pytest.raises(EarnestError, match=f"set at most {most}"):
        preflight(replace(setup, config=make_config(f"sampling.max_new_tokens={most + 1}")))


def test_a_missing_chat_template_leaves_no_folder(
    tiny: Path, tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    import shutil

    shutil.copytree(tiny, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with pytest.raises(EarnestError, match="no chat template"):
        start("test", make_config(f"model={tmp_path / 'base'}", f"out={tmp_path / 'run'}"), quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("place", "says"), [("file", "is a file"), ("file/x", "is a file"), ("/proc/x", "cannot be made")]
)
def test_a_place_where_no_folder_can_be_made(
    place: str, says: str, tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"out=.*{says}.*; choose"):
        start("test", make_config(f"out={tmp_path / place}"), quiet)


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))  # no file may be larger
from earnest import cli
cli.main(sys.argv[1:])
"""


def test_a_disk_that_fills_up_at_a_checkpoint_ends_in_a_sentence(tiny: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: only the checkpoint of step 2 is larger."""
    import subprocess
    import sys

    from tests.runs.tiny import recipe

    words = ["run", str(recipe(tmp_path / "r.yaml", tiny)), "adapter.rank=16", f"out={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-B", "-c", FULL.format(limit=16_000), *words],  # -B: compiled modules would be cut off, too
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "cannot write" in done.stderr and "File too large" in done.stderr
    assert f"continue with: earnest run {tmp_path / 'run'} --resume" in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    with pytest.raises(SystemExit) as end:
        cli.main(["run", str(tmp_path / "run"), "--resume"])
    assert end.value.code == 0


def test_other_users_can_read_the_weights(folder: Path) -> None:
    """Files have the mode that the umask gives, not 0600."""
    import os

    umask = os.umask(0)
    os.umask(umask)
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != ".lock"]
    assert {f.suffix for f in files} >= {".safetensors", ".json", ".jsonl"}
    assert {oct(f.stat().st_mode & 0o777) for f in files} == {oct(0o666 & ~umask)}


# --- its parts --------------------------------------------------------------------------------------------------------


def test_demonstrations_end_their_turn(make_config: Make) -> None:
    setup = build(make_config("task=sort", "objective=[{kind: sft}]"), say_nothing)
    prompt = setup.task.prompts("train", 1, 0)[0]
    asked, answer = demonstrate(setup.policy, setup.task, prompt)
    assert setup.policy.decode(answer) == prompt.data["answer"]
    assert answer[-1] in setup.policy.eos_ids and not set(answer[:-1]) & setup.policy.eos_ids
    assert asked == setup.policy.render(prompt.messages)
    batch = BatchSource(setup).next(1).batch
    assert set(batch.role) == {"demonstration"} and batch.behaviour is None and batch.advantages is None


def test_sft_learns_its_demonstrations(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    more = (
        "task=sort",
        "objective=[{kind: sft}]",
        "steps=16",
        "sampling.prompts_per_step=16",
        "optimizer.lr=3e-2",
        "eval.every=0",
        "adapter.targets=all-linear",
    )
    folder = start("test", make_config(*more, f"out={tmp_path / 'run'}"), quiet).folder
    losses = [line["loss"] for line in lines(folder / "metrics.jsonl") if line["kind"] == "step"]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert report.load(folder).steps[0].reward is None


def test_rollouts_and_demonstrations_share_a_step(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    objective = "objective=[{kind: grpo}, {kind: sft, weight: 0.1}]"
    setup = build(make_config("task=sort", objective), say_nothing)
    batch = BatchSource(setup).next(1).batch
    assert [batch.role.count(r) for r in ("rollout", "demonstration")] == [8, 2]
    assert bool((batch.advantages[batch.has_role(("demonstration",))[batch.row]] == 0).all())
    report_ = setup.engine.step(batch, setup.objective)
    assert set(report_.terms) == {"grpo", "sft"} and report_.terms["sft"].value > 0


def test_truncated_importance_gets_the_trainers_own_logprobs(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    config = make_config("objective.0.correction={level: token}", "steps=1", f"out={tmp_path / 'run'}")
    folder = start("test", config, quiet).folder
    line = next(line for line in lines(folder / "metrics.jsonl") if line["kind"] == "step")
    assert "importance" in line["terms"]["grpo"]["ran"]


def test_the_standard_error_is_over_prompts() -> None:
    """means .5, 1, 0, .5: sd = sqrt((0 + .25 + .25 + 0)/3) = .40825, over √4 = .20412."""
    assert standard_error([0.5, 1.0, 0.0, 0.5]) == pytest.approx(0.2041241)
    assert standard_error([0.5]) is None
    gained, se = gain([0.0, 0.5, 0.5], [0.5, 1.0, 1.0])
    assert gained == pytest.approx(0.5) and se == pytest.approx(0.0), (
        "every prompt gained the same: nothing is uncertain"
    )


def test_evaluation_numbers_by_hand(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = build(make_config("eval.prompts=4", "eval.samples=2"), say_nothing)
    rewards = iter([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    monkeypatch.setattr(type(setup.task), "grade", lambda self, p, c: Grade((r := next(rewards)), "", r == 1.0))
    found = evaluate(setup, 3)
    assert found.means == (0.5, 1.0, 0.0, 0.5)
    record = found.record(0.0)
    assert (record["reward"], record["n"], record["prompts"], record["correct"]) == (0.5, 8, 4, 0.5)
    assert record["se"] == pytest.approx(0.2041241)


def test_held_out_prompts_are_held_out(make_config: Make) -> None:
    setup = build(make_config("eval.prompts=50"), say_nothing)
    held = {p.id for p in setup.task.prompts("heldout", 50, 20_240)}
    trained = {p.id for p in BatchSource(setup).stream.next(500)} | {
        p.id for p in BatchSource(setup, "check").stream.next(100)
    }
    assert not held & trained


def test_the_probe_leaves_no_trace(make_config: Make) -> None:
    setup = build(make_config(), say_nothing)
    before = {k: v.clone() for k, v in setup.adapter.state_dict().items()}
    assert prove(setup.engine, setup.objective, probe_batch(setup), quick=True).holds
    assert all(torch.equal(before[k], v) for k, v in setup.adapter.state_dict().items())
    assert setup.engine.version == 0 and not setup.engine.optimizer.state


def test_derived_seeds_differ() -> None:
    seeds = {derive(s, p, n) for s in range(20) for p in ("train", "check", "step") for n in range(20)}
    assert len(seeds) == 20 * 3 * 20 and all(0 <= s < 2**62 for s in seeds)


@pytest.mark.integration
def test_no_config_field_is_read_by_nothing(
    tmp_path: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every field of every config class is looked at by somebody between the start and the end of a run."""
    read: set[tuple[str, str]] = set()
    look = Strict.__getattribute__

    def watch(self: Any, name: str) -> Any:
        read.add((type(self).__name__, name))
        return look(self, name)

    terms = "objective=[{kind: grpo}, {kind: sdpo, support: full}]"
    more = ("teacher={kind: ema}", "loggers=[tensorboard]", "best={patience: 9}")
    config = make_config(terms, *more, f"out={tmp_path / 'run'}")
    monkeypatch.setattr(Strict, "__getattribute__", watch)
    start("test", config, quiet)
    monkeypatch.undo()

    def classes(model: Any) -> set[Any]:
        """The config classes that a run's config is made of."""
        found = {model}
        waiting = [f.annotation for f in model.model_fields.values()]
        while waiting:
            kind = waiting.pop()
            waiting += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, Strict):
                found |= classes(kind)
        return found

    # what replicas, guards, services and samplers do with theirs is watched where they run (tests/guards, …/serve);
    # other models as teachers read theirs in tests/signals
    others = ("SyncConfig", "GuardConfig", "EngineConfig", "SamplerConfig")
    parts = {c for c in classes(RunConfig) if c.__name__ not in others}
    fields = {(c.__name__, f) for c in parts for f in c.model_fields}
    # read by `earnest recipes`, by replicas alone, and while the config is validated
    unread = fields - read - {("RunConfig", name) for name in ("description", "sync", "imports", "grade")}
    unread -= {("TeacherConfig", name) for name in ("model", "adapter", "url", "key", "prompt")}
    assert len(fields) > 40 and unread == set()


def test_bars_on_a_terminal(tmp_path: Path, make_config: Make) -> None:
    import io

    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    start("test", make_config("steps=2", f"out={tmp_path / 'run'}"), screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "2/2" in shown and "held-out" in shown and "gradient" in shown and "tokens/s" in shown
    assert "grpo" not in shown, "the value of an on-policy surrogate means nothing"
    assert isinstance(Bars(screen), Bars)
