"""KTO by hand, its KL baseline against the model's own logits, and runs on a file of judged answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from earnest.config import RunConfig, load_file
from earnest.engines import LocalEngine
from earnest.errors import ConfigError, EarnestError, SignalError
from earnest.objectives import KTO, Objective
from earnest.objectives.needs import LogProb
from earnest.objectives.view import Field
from earnest.runs import start
from earnest.runs.collect import BatchSource
from earnest.runs.setup import build
from earnest.signals import Batch, Reference, with_reference
from earnest.signals.baseline import kl_baseline, mismatched_prompts
from tests.engines.conftest import make_engine as make_engine
from tests.runs.tiny import recipe, tiny_folder

Make = Callable[..., LocalEngine]


def judged(lengths: tuple[int, ...] = (2, 1), z: float = 0.5) -> Batch:
    roles = ("chosen", "rejected") * (len(lengths) // 2)
    made = Batch.from_rows([[i + 1] for i in range(len(lengths))], [[2] * n for n in lengths], role=roles)
    reference = Reference(torch.linspace(-3, -1, sum(lengths)).double())
    return made.with_signals(reference=reference, kl_baseline=torch.full((len(lengths),), z))


def test_kto_by_hand() -> None:
    """Wanted: lp -1, -2, ref -3, -2, so r = 2; unwanted: lp -2, ref -1, so r = -1; z = ½, β = ½.

    wanted    1 - σ(0.5·1.5) = 0.3208213, slope -β·σ'(0.75)/2
    unwanted  1 - σ(0.5·1.5) = 0.3208213, slope +β·σ'(0.75)/2;  with λ 2 and 0.5 the mean is 1.25·0.3208213
    """
    batch = judged()
    lp = torch.tensor([-1.0, -2.0, -2.0], dtype=torch.float64, requires_grad=True)
    term = Objective.of(KTO(beta=0.5, desirable_weight=2.0, undesirable_weight=0.5))
    term.check(batch)
    value = term.evaluate(batch, {LogProb(): Field(lp)}, {}).values["kto"]
    assert float(value.loss.detach()) == pytest.approx(1.25 * 0.3208213, rel=1e-6)
    slope = 0.5 * 0.3208213 * (1 - 0.3208213) / 2
    assert torch.autograd.grad(value.loss, lp)[0].tolist() == pytest.approx([-2 * slope, -2 * slope, 0.5 * slope])
    metrics = {name: metric.value for name, metric in value.metrics.items()}
    assert metrics["accuracy"] == 1 and metrics["kl_baseline"] == 0.5
    assert (metrics["reward_chosen"], metrics["reward_rejected"]) == (1.0, -0.5)


def test_gradcheck_and_a_saturated_answer_has_no_nan() -> None:
    batch = judged((3, 1, 2, 4))

    def loss(lp: Tensor) -> Tensor:
        return Objective.of(KTO(beta=0.4)).evaluate(batch, {LogProb(): Field(lp)}, {}).loss

    lp = -3 * torch.rand(10, generator=torch.Generator().manual_seed(0)).double()
    assert torch.autograd.gradcheck(loss, (lp.requires_grad_(),))
    far = torch.full((10,), -900.0, dtype=torch.float64, requires_grad=True)
    value = loss(far)
    assert math.isfinite(value.item()) and torch.isfinite(torch.autograd.grad(value, far)[0]).all()


def test_a_batch_of_one_label_trains_and_the_baseline_is_required() -> None:
    batch = Batch.from_rows([[1], [2]], [[2], [3]], role="chosen").with_signals(reference=Reference(torch.zeros(2)))
    with pytest.raises(SignalError, match="kto: needs the signal 'kl_baseline'"):
        Objective.of(KTO()).check(batch)
    term = Objective.of(KTO(baseline="zero"))
    assert term.check(batch) == {}
    loss = term.evaluate(batch, {LogProb(): Field(torch.zeros(2))}, {}).loss
    assert float(loss) == 0.5


# --- the baseline -----------------------------------------------------------------------------------------------------


def test_the_baseline_is_the_mean_log_ratio_of_mismatched_rows(make_engine: Make) -> None:
    """Against the model's own logits: each completion after the next row's prompt; the second two share a prompt."""
    engine = make_engine()
    prompts, completions = [[5, 9, 11], [7, 4], [7, 4], [30]], [[20, 21], [22], [23, 24, 25], [26, 1]]
    roles = ("chosen", "rejected", "chosen", "rejected")
    batch = Batch.from_rows(prompts, completions, role=roles)
    expected = {0: prompts[1], 1: prompts[3], 2: prompts[3], 3: prompts[0]}
    assert mismatched_prompts(batch, None) == expected

    def total(prompt: list[int], completion: list[int]) -> float:
        with torch.no_grad():
            lp = engine.policy.model(torch.tensor([prompt + completion])).logits[0].double().log_softmax(-1)  # type: ignore[attr-defined]
        return sum(float(lp[len(prompt) + i - 1, token]) for i, token in enumerate(completion))

    live = [total(expected[r], completions[r]) for r in range(4)]
    with engine.adapter.off():
        base = [total(expected[r], completions[r]) for r in range(4)]
    mean = sum(a - b for a, b in zip(live, base, strict=True)) / 4
    found = with_reference(engine, batch, KTO()).kl_baseline
    assert found is not None and found.tolist() == pytest.approx([max(0.0, mean)] * 4, rel=1e-5)
    swapped = kl_baseline(_Swapped(engine), batch)
    assert sorted([float(found[0]), float(swapped[0])]) == pytest.approx([0.0, abs(mean)], rel=1e-5), "never below 0"


class _Swapped:
    """The engine with the live policy and its base exchanged, so the log-ratio has the other sign."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.policy = engine, engine.policy

    def score(self, batch: Batch, want: object, policy: str = "live") -> Tensor:
        return self.engine.score(batch, want, "base" if policy == "live" else "live")  # type: ignore[arg-type, return-value]


def test_one_prompt_has_no_baseline_and_the_context_limits_the_partners() -> None:
    with pytest.raises(SignalError, match=r"no second prompt that fits; take more rows per step .*baseline=zero"):
        mismatched_prompts(Batch.from_rows([[1, 2]] * 2, [[3], [4]], role=("chosen", "rejected")), None)
    batch = Batch.from_rows([[1], [2] * 6, [3] * 2], [[4] * 3, [5], [6]], role="chosen")
    assert mismatched_prompts(batch, 5) == {0: [3, 3], 1: [3, 3], 2: [1]}


def test_micro_batches_give_the_whole_gradient(make_engine: Make) -> None:
    engine, cut = make_engine(), make_engine(micro_tokens=4)
    rows = Batch.from_rows([[5, 9], [7], [8, 4, 3]], [[20, 21], [22], [23, 24]], role=("chosen", "rejected", "chosen"))
    batch = with_reference(engine, rows, KTO())
    whole, parts = engine.gradients(batch, KTO(beta=1.0)), cut.gradients(batch, KTO(beta=1.0))
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-5, atol=1e-9)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def judgements(tmp_path: Path) -> Path:
    """Answers with an exclamation mark are wanted, those with a full stop are not; every third row is unwanted."""
    path = tmp_path / "judged.jsonl"
    rows = [
        {"prompt": f"say {i}", "completion": f"no {i}." if i % 3 == 0 else f"yes {i}!", "label": i % 3 != 0}
        for i in range(45)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def config_of(tiny: Path, place: Path, file: Path, *more: str) -> RunConfig:
    own = ("task=null", f"data={{train: {file}, heldout: 0.3}}", "eval.every=0", "eval.prompts=20")
    return load_file(recipe(place / "recipe.yaml", tiny), [*own, *more])


def test_one_prompt_per_step_is_refused_before_the_folder_is_made(tmp_path: Path, tiny: Path, judgements: Path) -> None:
    words = ("objective=[{kind: kto}]", "sampling.prompts_per_step=1", f"out={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="a step needs at least 2 prompts, got 1"):
        start("test", config_of(tiny, tmp_path, judgements, *words), Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_run_on_judged_answers_separates_them(tmp_path: Path, tiny: Path, judgements: Path) -> None:
    options = ("objective=[{kind: kto}]", "steps=12", "sampling.prompts_per_step=8", "optimizer.lr=0.02")
    config = config_of(tiny, tmp_path, judgements, *options, f"out={tmp_path / 'run'}")
    folder = start("test", config, Console(quiet=True)).folder
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, after = (line for line in found if line["kind"] == "eval")
    assert before["accuracy"] == pytest.approx(0.5, abs=0.01) and after["accuracy"] > 0.9
    assert after["measure"] == "accuracy" and after["metrics"]["judged/heldout"] == after["prompts"]
    assert after["metrics"]["judged/reward_wanted"] > after["metrics"]["judged/reward_unwanted"] + 1
    steps = [line for line in found if line["kind"] == "step"]
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-3) and steps[-1]["loss"] < 0.49
    assert json.loads((folder / "run.json").read_text())["data"]["layout"] == "judged"


def test_a_step_has_one_row_for_each_answer_and_its_label_is_its_role(
    tmp_path: Path, tiny: Path, judgements: Path
) -> None:
    config = config_of(tiny, tmp_path, judgements, "objective=[{kind: kto}]", "sampling.prompts_per_step=3")
    setup = build(config, lambda _: None)
    seen = set()
    for step in range(1, 5):
        batch = BatchSource(setup).next(step).batch
        text = [setup.policy.decode(batch.targets[r][batch.weight[r] != 0].tolist()) for r in range(3)]
        assert batch.role == tuple("chosen" if t.startswith("yes") else "rejected" for t in text)
        assert batch.pair.tolist() == [-1] * 3 and batch.kl_baseline is not None
        seen |= set(batch.role)
    assert seen == {"chosen", "rejected"}
    one = [n for n in range(1, 20) if BatchSource(setup).next(n).batch.active_roles == {"chosen"}]
    assert one, "a batch with wanted answers only is a legitimate batch"


def test_pairs_and_single_labels_are_told_apart(tmp_path: Path, tiny: Path, judgements: Path) -> None:
    with pytest.raises(ConfigError, match=r"dpo compares pairs, and the rows of .* are single answers with a label"):
        build(config_of(tiny, tmp_path, judgements, "objective=[{kind: dpo}]"), lambda _: None)
    with pytest.raises(ConfigError, match=r"no term reads the judged answers of .*; add a term on them: kto"):
        build(config_of(tiny, tmp_path, judgements, "objective=[{kind: sft}]"), lambda _: None)
    wanted = [line for line in judgements.read_text().splitlines() if json.loads(line)["label"]]
    judgements.write_text("\n".join(wanted))
    setup = build(config_of(tiny, tmp_path, judgements, "objective=[{kind: kto}]"), lambda _: None)
    assert setup.data is not None
    with pytest.raises(EarnestError, match=r"all \d+ held-out rows of .* have the label True"):
        setup.data.measure(setup.engine, 20)
