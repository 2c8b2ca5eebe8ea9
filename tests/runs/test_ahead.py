"""Rollouts that do not wait: samplers with engines of their own work while the trainer trains; the run is recorded, and
replays bit for bit."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from earnest.config import RunConfig, dump, load_file
from earnest.engines.base import Rollout
from earnest.errors import CheckpointError, ConfigError, EarnestError, SamplingError
from earnest.models import SampleSpec
from earnest.runs import RunFolder, replay, resume, start
from earnest.runs.ahead import BatchesAhead
from earnest.runs.errors import RunStopped
from earnest.runs.lifecycle import go
from earnest.runs.preflight import preflight
from earnest.runs.sampling import sampling_engine
from earnest.runs.setup import Setup, build
from earnest.sync.base import SamplerEngine, SamplerLost, Weights
from earnest.sync.pool import SamplerPool
from earnest.sync.process import ProcessSampler
from tests.runs.tiny import recipe, tiny_folder

WORLDS = Path(__file__).parents[1] / "rollouts" / "worlds.py"
QUIET = Console(file=io.StringIO())


class Elsewhere:
    """A sampler with an engine of its own in this process. It dies at the calls of ``sample`` in ``deaths``."""

    plain: bool | None = None

    def __init__(self, number: int, config: RunConfig, deaths: Sequence[int] = ()) -> None:
        self.place, self.deaths, self.calls = f"sampler {number}", set(deaths), 0
        self.engine: SamplerEngine | None = None
        self.make = lambda: SamplerEngine(sampling_engine(dump(config)))
        self.change: Callable[[Rollout], Rollout] = lambda r: r
        self.restart()

    def restart(self) -> None:
        self.engine = self.make()
        self.holds = False

    def push(self, weights: Weights) -> None:
        assert self.engine is not None
        self.engine.push(weights.version, dict(weights.state))
        self.holds = True

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        assert self.engine is not None and self.holds
        return self.engine.score(rows)

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        assert self.engine is not None and self.holds
        self.calls += 1
        if self.calls in self.deaths:
            raise SamplerLost(f"{self.place} is gone")
        return [self.change(r) for r in self.engine.sample(prompts, n, spec)]

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ahead")
    return recipe(place / "recipe.yaml", tiny_folder(place / "tiny"), check=False)


def config_of(path: Path, out: Path, *overrides: str) -> RunConfig:
    return load_file(path, ["threads=1", "eval.every=3", "checkpoint.every=2", f"out={out}", *overrides])


def pooled(config: RunConfig, samplers: int = 2, deaths: Sequence[int] = ()) -> tuple[Setup, list[Elsewhere]]:
    """The run's parts with samplers that work ahead of it."""
    assert config.sampler is not None
    setup = build(config.model_copy(update={"sampler": None}), lambda _: None)
    members = [Elsewhere(i, config, deaths if i == 0 else ()) for i in range(samplers)]
    assert setup.task is not None
    rows = [list(setup.policy.render(p.messages)) for p in setup.task.prompts("heldout", 2, 0)]
    wanted = config.sampler
    engine = setup.require_local("a test")
    pool = SamplerPool(engine, rows, members, staleness=wanted.staleness, partial=wanted.partial)
    return replace(setup, config=config, samplers=pool), members


def trained(setup: Setup, resumed: bool = False) -> Path:
    assert isinstance(setup.config, RunConfig) and setup.config.out is not None
    place = Path(setup.config.out)
    if resumed:
        run = RunFolder.open(place)
    else:
        header = {"recipe": "test", **setup.describe()}
        run = RunFolder.create(place, setup.config, setup.policy, header)
    return go(setup, run, QUIET, resumed=resumed).folder


def record(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def check_record(folder: Path, staleness: int) -> None:
    """Every batch trained once and none left out before the last; no row too old; each by the version it names."""
    found = record(folder)
    batches = [line["batch"] for line in found]
    assert len(set(batches)) == len(batches) and [line["step"] for line in found] == list(range(1, len(found) + 1))
    assert set(range(len(found) - staleness)) <= set(batches)
    for line in found:
        versions = {row["rollout"]["policy_version"] for row in line["rows"]}
        assert versions == set(line["versions"]) and line["version"] - min(versions) <= staleness
        places = [(r["rollout"]["prompt_index"], r["rollout"]["sample_index"]) for r in line["rows"]]
        assert places == sorted(set(places)), "every completion once"


def test_staleness_0_is_the_run_without_it_bit_for_bit(path: Path, tmp_path: Path) -> None:
    plain = start("test", config_of(path, tmp_path / "plain", "steps=3"), QUIET).folder
    zero = start("test", config_of(path, tmp_path / "zero", "steps=3", "sampler={staleness: 0}"), QUIET).folder
    assert weights(zero) == weights(plain) and not (zero / "rollouts.jsonl").exists()
    assert [x.get("means", x["reward"]) for x in lines(zero)] == [x.get("means", x["reward"]) for x in lines(plain)]


def test_an_asynchronous_run_is_recorded_and_replays_bit_for_bit(path: Path, tmp_path: Path) -> None:
    """Two samplers, one of which dies twice; evaluations in between; the trainer waits for nothing that it can train
    on, so some rows are older than the weights."""
    config = config_of(path, tmp_path / "run", "steps=7", "sampler={staleness: 2}")
    setup, members = pooled(config, deaths=(2, 5))
    engine, inner = setup.require_local("a test"), setup.require_local("a test").step

    def step(*given: Any, **more: Any) -> Any:
        """The first update waits until another batch is being sampled: one call each was the evaluation's."""
        while engine.version == 0 and sum(member.calls for member in members) < len(members) + 2:
            time.sleep(0.01)
        return inner(*given, **more)

    engine.step = step  # type: ignore[method-assign]
    folder = trained(setup)
    check_record(folder, 2)
    steps = [x["metrics"] for x in lines(folder) if x["kind"] == "step"]
    assert max(m["sampler/age_max"] for m in steps) >= 1
    # a death during an evaluation is not one of the flow: its rows are not sampled again by the ledger
    assert steps[-1]["sampler/restarts"] == 2 and 1 <= steps[-1]["sampler/again"] <= 2
    assert all(0 <= m["sampler/idle"] <= 1 and 0 <= m["trainer/idle"] <= 1 for m in steps)
    terms = [x["terms"]["grpo"]["metrics"] for x in lines(folder) if x["kind"] == "step" and x["terms"]]
    assert any(abs(t["ratio"] - 1) > 1e-4 for t in terms), "the ratio is to the weights that sampled"
    page = (folder / "report.html").read_text()
    assert "Samplers worked while the trainer trained" in page and "share of the time that samplers waited" in page
    worked = [
        1 - found for found in (share_of(steps, lines(folder), name) for name in ("trainer/idle", "sampler/idle"))
    ]
    gain = f"the same work would take {sum(worked):.2f} times as long" if sum(worked) > 1 else "no time was gained"
    assert gain in page
    again = replay(folder, [f"out={tmp_path / 'again'}"], QUIET).folder
    assert weights(again) == weights(folder)
    assert "Samplers worked while the trainer trained" not in (again / "report.html").read_text()
    assert [x["means"] for x in lines(again) if x["kind"] == "eval"] == [
        x["means"] for x in lines(folder) if x["kind"] == "eval"
    ]


def share_of(metrics: list[dict[str, Any]], found: list[dict[str, Any]], name: str) -> float:
    """The mean of a share over the time of the steps."""
    spans = [sum(x["seconds"].values()) for x in found if x["kind"] == "step"]
    return sum(m[name] * span for m, span in zip(metrics, spans, strict=True)) / sum(spans)


@pytest.mark.parametrize("partial", ["continue", "restart"])
def test_completions_under_way_get_new_weights(path: Path, tmp_path: Path, partial: str) -> None:
    """The second batch has its first tokens when the weights of version 1 arrive: its other tokens are of version 1,
    or all of them. The trainer checks the log-probs of each version, and the run replays bit for bit."""
    given = f"sampler={{staleness: 2, partial: {partial}}}"
    config = config_of(path, tmp_path / "run", "steps=4", "eval.every=0", given)
    setup, (member,) = pooled(config, 1)
    pool, inner, parts = setup.samplers, member.sample, []
    assert pool is not None

    def sample(prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        found = inner(prompts, n, spec)
        if n > 1 and spec.max_new_tokens < config.sampling.max_new_tokens:  # the first slice of a part
            parts.append(n)
            end = time.monotonic() + 60
            while len(parts) == 2 and time.monotonic() < end and newest() == 0:
                time.sleep(0.01)
        return found

    def newest() -> int:
        return 0 if pool is None or pool._flow is None else pool._flow._target.weights.version

    engine, train = setup.require_local("a test"), setup.require_local("a test").step

    def step(*given: Any, **more: Any) -> Any:
        """The first update waits until the second batch has its first tokens."""
        end = time.monotonic() + 60
        while len(parts) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return train(*given, **more)

    engine.step = step  # type: ignore[method-assign]
    member.sample = sample  # type: ignore[method-assign]
    folder = trained(setup)
    check_record(folder, 2)
    spans = {tuple(map(tuple, row["rollout"]["continued"])) for line in record(folder) for row in line["rows"]} - {()}
    steps = [x["metrics"] for x in lines(folder) if x["kind"] == "step"]
    if partial == "continue":
        versions = [[version for _, version in found] for found in spans]
        assert any(found[:2] == [0, 1] for found in versions) and all(found == sorted(set(found)) for found in versions)
        assert max(m["sampler/continued"] for m in steps) > 0 and steps[-1]["sampler/again"] == 0
        ages = [m["sampler/age"] for m in steps if m["sampler/continued"]]
        assert any(not float(age).is_integer() for age in ages), "tokens of one batch have several ages"
    else:
        assert not spans and steps[-1]["sampler/again"] >= 1
    assert weights(replay(folder, [f"out={tmp_path / 'again'}"], QUIET).folder) == weights(folder)


def test_conversations_under_way_are_ahead_and_replay_bit_for_bit(path: Path, tmp_path: Path) -> None:
    """Each turn has the version that sampled it, and the batch trains exactly what the sampler returned."""
    world = f"{{name: '{WORLDS}:Echo', turns: 2, role: user}}"
    more = ("turns={max_turns: 3}", "sampling.max_new_tokens=24", "eval.prompts=1", "eval.every=0")
    config = config_of(path, tmp_path / "run", "steps=4", f"task={world}", *more, "sampler={staleness: 1}")
    folder = trained(pooled(config)[0])
    found = record(folder)
    assert len({line["batch"] for line in found}) == 4
    for line in found:
        turns = [s for r in line["rows"] for row in r["rollout"]["rows"] for s in row if s["author"] == "policy"]
        assert {s["policy_version"] for s in turns} <= set(line["versions"])
        assert all(line["version"] - s["policy_version"] <= 1 for s in turns)
        assert [t for r in line["rows"] for d in r["drawn"] for t in d["tokens"]] == [
            t for s in turns for t in s["tokens"]
        ]
    assert any(len(row["drawn"]) > 1 for line in found for row in line["rows"]), "some have several turns"
    again = replay(folder, [f"out={tmp_path / 'again'}"], QUIET).folder
    assert weights(again) == weights(folder)
    with pytest.raises(EarnestError, match=r"conversations of several turns .* end under the weights"):
        preflight(
            pooled(config_of(path, tmp_path / "no", f"task={world}", "sampler={staleness: 1, partial: restart}"))[0]
        )


def test_a_replay_with_other_numbers_is_refused_at_its_step(path: Path, tmp_path: Path) -> None:
    folder = trained(pooled(config_of(path, tmp_path / "run", "steps=4", "sampler={staleness: 1}"), 1)[0])
    found = record(folder)
    found[1]["rows"][0]["rollout"]["logprobs"][0] -= 0.25
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("config.yaml", "environment.json"):
        (changed / name).write_bytes((folder / name).read_bytes())
    (changed / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    with pytest.raises(RunStopped, match="the weights before step 3 differ from those of"):
        replay(changed, [f"out={tmp_path / 'again'}"], QUIET)
    with pytest.raises(ConfigError, match="seed: a replay keeps the run's config"):
        replay(folder, ["seed=5"], QUIET)
    (changed / "rollouts.jsonl").write_text(json.dumps(found[0]) + "\n")
    with pytest.raises(CheckpointError, match="has the rollouts of 1 of its 4 steps"):
        replay(changed, [f"out={tmp_path / 'third'}"], QUIET)
    (changed / "rollouts.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"only runs with sampler\.staleness above 0 record it"):
        replay(changed, [f"out={tmp_path / 'fourth'}"], QUIET)


def test_a_run_that_was_killed_goes_on_with_none_twice_and_none_lost(path: Path, tmp_path: Path) -> None:
    """It stops in step 6, after the checkpoint of step 4; what was sampled and not trained is sampled again."""
    config = config_of(path, tmp_path / "run", "steps=9", "sampler={staleness: 3}")
    setup, _ = pooled(config)
    engine, inner, calls = setup.require_local("a test"), setup.require_local("a test").step, []

    def step(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise EarnestError("killed")
        return inner(*given, **more)

    engine.step = step  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match="killed"):
        trained(setup)
    setup.close()
    folder = trained(pooled(config)[0], resumed=True)
    assert len(record(folder)) == 9
    check_record(folder, 3)
    assert weights(replay(folder, [f"out={tmp_path / 'again'}"], QUIET).folder) == weights(folder)


def test_what_a_sampler_raises_stops_the_run(path: Path, tmp_path: Path) -> None:
    """Log-probs that are not those of the version, also where the trainer is at a later one; too many deaths; and a
    version that nobody pushed."""
    made: list[tuple[str, Callable[[Elsewhere], None]]] = [
        ("nats per token off those of version", lambda m: setattr(m, "change", _colder)),
        ("died 3 times in a row", lambda m: setattr(m, "deaths", set(range(1, 100)))),
        ("answered with version 77", lambda m: setattr(m, "change", lambda r: replace(r, policy_version=77))),
    ]
    for place, (sentence, plant) in enumerate(made):
        config = config_of(path, tmp_path / f"run-{place}", "steps=4", "eval.prompts=1", "sampler={staleness: 1}")
        setup, (member,) = pooled(config, 1)
        inner = setup.samplers.ahead  # type: ignore[union-attr]

        def ahead(*given: Any, plant: Any = plant, member: Any = member, inner: Any = inner) -> Any:
            plant(member)  # after the first evaluation
            return inner(*given)

        setup.samplers.ahead = ahead  # type: ignore[union-attr, method-assign]
        if sentence.startswith("nats"):  # the first completions with new weights are compared
            setup.samplers.links[0].forget()  # type: ignore[union-attr]
        with pytest.raises((RunStopped, SamplingError), match=sentence):
            trained(setup)


def _colder(rollout: Rollout) -> Rollout:
    return replace(rollout, logprobs=tuple(0.5 * v for v in rollout.logprobs))


def test_a_sampler_process_is_killed_and_the_run_ends_well(path: Path, tmp_path: Path) -> None:
    """A real process, killed with SIGKILL while the run trains."""
    config = config_of(path, tmp_path / "run", "steps=3", "sampler={staleness: 1}", "eval.every=0")
    setup = build(config, lambda _: None)
    assert setup.samplers is not None
    first = setup.samplers.links[0].sampler
    assert isinstance(first, ProcessSampler)
    killed = first.process.pid
    engine, inner = setup.require_local("a test"), setup.require_local("a test").step

    def step(*given: Any, **more: Any) -> Any:
        if engine.version == 0:
            os.kill(killed, signal.SIGKILL)
        return inner(*given, **more)

    engine.step = step  # type: ignore[method-assign]
    folder = trained(setup)
    check_record(folder, 1)
    assert first.process.pid != killed and first.process.poll() is not None, "its successor ended with the run"
    assert first._pipe.closed
    assert weights(replay(folder, [f"out={tmp_path / 'again'}"], QUIET).folder) == weights(folder)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["sampler={staleness: 1}", "updates_per_batch=2"], "leaves no room to sample ahead; set at least 2, or 0"),
        (["sampler={staleness: 1}", "replicas=2"], "replicas sample and train in turns"),
        (["sampler={staleness: -1}"], "staleness"),
        (["sampler={partial: continue}"], "sampler.partial: has a meaning only with staleness above 0"),
    ],
)
def test_staleness_that_cannot_work_is_refused(path: Path, given: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_file(path, given)


@pytest.mark.slow
def test_a_finished_asynchronous_run_can_be_continued(path: Path, tmp_path: Path) -> None:
    """Through the public functions, with a real process: more steps go on with the next batches."""
    config = config_of(path, tmp_path / "run", "steps=2", "sampler={staleness: 1}", "eval.every=0")
    start("test", config, QUIET)
    folder = resume(tmp_path / "run", ["steps=4"], QUIET).folder
    check_record(folder, 1)
    assert len(record(folder)) == 4


def test_one_sampler_at_a_time_moves_the_stream_of_prompts(path: Path, tmp_path: Path) -> None:
    setup = pooled(config_of(path, tmp_path / "run", "sampler={staleness: 1}"))[0]
    assert isinstance(setup.samplers, SamplerPool)
    run = RunFolder(tmp_path)
    source = BatchesAhead(setup, setup.samplers, run, None)
    stream, held = source.stream, []
    assert stream is not None
    following = stream.next
    stream.next = lambda count: held.append(source._stream_lock.locked()) or following(count)  # type: ignore[method-assign, func-returns-value]
    assert [p.id for p in source.prompts(1)] == [p.id for p in source.prompts(1)] != [p.id for p in source.prompts(0)]
    run.close()
    assert held == [True] * 3 and not source._stream_lock.locked()
