"""A teacher that is another model: its distributions against its own logits, its tokenizer, and runs with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import earnest as en
from earnest.config import from_mapping
from earnest.engines import AdamW, LocalEngine
from earnest.engines.model_teacher import ModelTeacher, check_tokenizer
from earnest.errors import ConfigError, SignalError
from earnest.models.policy import Policy
from earnest.objectives import SDPO, TAID, Distill, EntropyAware, Objective, Term
from earnest.objectives.teacher_term import teacher_support
from earnest.runs import start
from earnest.runs.collect import BatchSource
from earnest.runs.setup import build
from earnest.signals import Batch, FullLogits, TopK, with_teacher
from earnest.signals.distributions import ScoredAt
from tests.engines.conftest import VOCABULARY, perturb, tiny_policy

ROWS = Batch.from_rows([[3, 4], [5, 6, 7]], [[8, 9, 10], [12, 1]], behaviour=[[-3.0] * 3, [-2.0] * 2])


@pytest.fixture
def engine() -> LocalEngine:
    policy = tiny_policy()
    adapter = en.attach(policy, en.LoRA(rank=3), targets=("q_proj", "v_proj"), seed=0)
    perturb(adapter)
    return LocalEngine(policy, adapter, AdamW(lr=1e-2))


def taught(engine: LocalEngine, teacher: ModelTeacher) -> Batch:
    return with_teacher(engine, ROWS, None, teacher)


def loss(engine: LocalEngine, term: Term, teacher: ModelTeacher) -> float:
    batch, objective = taught(engine, teacher), Objective.of(term)
    state = objective.initial_state()
    objective.check(batch)
    return objective.evaluate(batch, engine.scalars(batch, objective.needs(batch, state)), state).loss.item()


def logprobs(policy: Policy, row: int) -> Tensor:
    """log p at the positions before each completion token of a row, from the model's own logits."""
    size = ROWS.lengths[row]
    with torch.no_grad():
        z = policy.model(ROWS.inputs[row : row + 1, :size]).logits[0].double()  # type: ignore[attr-defined]
    return z[ROWS.position[ROWS.row == row]].log_softmax(-1)


# --- distributions ----------------------------------------------------------------------------------------------------


def test_the_divergence_is_that_of_the_two_models_own_logits(engine: LocalEngine) -> None:
    teacher = ModelTeacher(tiny_policy(seed=5))
    forward = []
    for row in range(2):
        ours, theirs = logprobs(engine.policy, row), logprobs(teacher.policy, row)
        forward += (theirs.exp() * (theirs - ours)).sum(-1).tolist()
    assert loss(engine, Distill(alpha=0.0), teacher) == pytest.approx(sum(forward) / 5, rel=1e-5)
    batch = taught(engine, teacher)
    assert batch.teacher is not None and batch.teacher.kind == "model" and batch.teacher.at is None
    exact = torch.cat(
        [logprobs(teacher.policy, r).gather(-1, ROWS.token_target[ROWS.row == r][:, None]) for r in (0, 1)]
    )
    torch.testing.assert_close(batch.teacher.logprobs, exact[:, 0].to(batch.teacher.logprobs.dtype))  # type: ignore[union-attr]


@pytest.mark.parametrize("support", ["teacher", "student"])
def test_a_top_k_with_its_tail_gives_the_loss_of_all_logits(engine: LocalEngine, support: str) -> None:
    """The tail is the log-sum-exp of the other logits, for the teacher's top K and at the student's."""
    model = tiny_policy(seed=5)
    whole, compact = ModelTeacher(model), ModelTeacher(model, support, 7)
    form = taught(engine, compact).teacher.distribution  # type: ignore[union-attr]
    assert isinstance(form, ScoredAt if support == "student" else TopK) and form.ids.shape == (5, 7)
    mass = form.logprobs.double().exp().sum(-1) + form.tail.double().exp()
    torch.testing.assert_close(mass, torch.ones(5).double(), rtol=1e-6, atol=0)
    for term in (
        Distill(support=support, top_k=7),
        SDPO(support=support, top_k=7),
        EntropyAware(support=support, top_k=7),
    ):
        if term.kind == "entropy_aware":  # of a top-K the teacher's entropy is a lower bound, so no threshold
            term = EntropyAware(support=support, top_k=7, threshold=0.0)
        assert loss(engine, term, compact) == pytest.approx(loss(engine, term, whole), rel=1e-5), term.kind


def test_the_form_follows_the_terms() -> None:
    top = {"support": "teacher", "top_k": 5}
    assert teacher_support(Objective.of(Distill(**top))) == ("teacher", 5)
    assert teacher_support(Objective.of(SDPO())) == ("student", 100)
    for term in (Distill(), TAID(**top), Distill(**top, temperature=2.0), Distill(**top, wrap=TAID())):
        assert teacher_support(Objective.of(term)) == ("full", 0), "these read logits"
    assert teacher_support(Distill(**top) + SDPO()) == ("full", 0), "they compare on different tokens"


def test_a_vocabulary_that_is_padded_differently_is_cut_or_filled(engine: LocalEngine) -> None:
    model = tiny_policy(seed=5)
    expected = taught(engine, ModelTeacher(model)).teacher.distribution  # type: ignore[union-attr]
    assert isinstance(expected, FullLogits)
    for size in (VOCABULARY + 9, VOCABULARY - 3):
        other = tiny_policy(seed=5)
        other.model.resize_token_embeddings(size, mean_resizing=False)  # type: ignore[attr-defined]
        other = Policy.of(other.model, other.tokenizer, name="padded")  # type: ignore[arg-type]
        found = taught(engine, ModelTeacher(other)).teacher.distribution  # type: ignore[union-attr]
        assert isinstance(found, FullLogits) and found.logits.shape == (5, VOCABULARY)
        kept = min(size, VOCABULARY)
        torch.testing.assert_close(found.logits[:, :kept], expected.logits[:, :kept])
        if size < VOCABULARY:
            assert (found.logits[:, kept:] == found.logits[:, :kept].amin(-1, keepdim=True)).all()


def test_too_many_logits_are_refused_with_the_way_out(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("earnest.engines.model_teacher.MOST_BYTES", 4 * 5 * VOCABULARY - 1)
    with pytest.raises(
        SignalError, match=r"all logits of 5 tokens × 131 need .* GiB; set support: teacher and a top_k"
    ):
        taught(engine, ModelTeacher(tiny_policy(seed=5)))


def test_another_tokenizer_is_refused_by_its_first_differing_token(engine: LocalEngine) -> None:
    other = tiny_policy(seed=5)
    inner = json.loads(other.tokenizer.backend_tokenizer.to_str())
    vocabulary = inner["model"]["vocab"]
    vocabulary["w40"], vocabulary["w77"] = 77, 40
    from tokenizers import Tokenizer

    other.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(inner))
    with pytest.raises(ConfigError, match=r"token 40 is 'w40' for the student and 'w77' for the teacher.*same family"):
        check_tokenizer(engine.policy, other)
    del vocabulary["w130"]
    vocabulary["w40"], vocabulary["w77"] = 40, 77
    other.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(inner))
    with pytest.raises(ConfigError, match=r"token 130 is 'w130' for the student and no token for the teacher"):
        check_tokenizer(engine.policy, other)
    check_tokenizer(other, engine.policy)  # a teacher with more tokens knows all of the student's


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nano with perturbed weights, as a model folder."""
    policy = en.load("nano")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2 * p.std().nan_to_num(0.0))
    place = tmp_path_factory.mktemp("second")
    policy.model.save_pretrained(place)  # type: ignore[operator]
    policy.tokenizer.save_pretrained(place)
    return place


def recipe(second: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": "nano",
        "task": "sort",
        "adapter": {"kind": "lora", "rank": 8},
        "objective": [{"kind": "distill", "alpha": 1.0}],
        "teacher": {"kind": "model", "model": str(second)},
        "sampling": {"prompts_per_step": 4, "completions_per_prompt": 2, "max_new_tokens": 6},
        "optimizer": {"kind": "adamw", "lr": 2e-3},
        "eval": {"every": 0, "prompts": 2, "samples": 2},
        "steps": 10,
        "threads": 1,
    } | changes


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    rows = [{"prompt": f"say {i}", "completion": f"yes {i}!"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_on_a_file_moves_towards_the_other_model(second: Path, talks: Path, tmp_path: Path) -> None:
    """Without a task and without another term. The proof of the step (``check``) runs on this teacher, too."""
    own = {"task": None, "data": {"train": str(talks), "heldout": 0.2}, "out": str(tmp_path / "run")}
    sampling = {"prompts_per_step": 16}
    config = from_mapping(recipe(second, objective=[{"kind": "distill", "alpha": 0.0}], **own, sampling=sampling))
    folder = start("test", config, Console(quiet=True)).folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert losses[0] > 0.02 and losses[-1] < 0.7 * losses[0], losses
    setup = build(config, lambda _: None)
    batch = BatchSource(setup).next(1).batch
    assert set(batch.role) == {"demonstration"} and batch.teacher is not None and batch.teacher.at is None


@pytest.mark.parametrize("kind", ["distill", "sdpo", "taid", "entropy_aware"])
def test_every_term_with_a_teacher_takes_the_other_model(second: Path, kind: str) -> None:
    setup = build(from_mapping(recipe(second, objective=[{"kind": kind}])), lambda _: None)
    batch = BatchSource(setup).next(1).batch
    assert batch.teacher is not None and batch.teacher.kind == "model"
    if kind == "sdpo":
        assert batch.teacher.at is not None, "its teacher reads feedback, which not every rollout has"
    else:
        assert batch.teacher.at is None, "its teacher reads every row"
    report = setup.engine.step(batch, setup.objective)
    assert report.loss > 0 and report.update.gradient_norm > 0


def test_an_adapter_names_its_base_and_changes_the_teacher(second: Path, tmp_path: Path) -> None:
    policy = en.load(str(second))
    adapter = en.attach(policy, en.LoRA(rank=2), seed=3)
    perturb(adapter, size=0.5)
    adapter.save(tmp_path / "adapter", str(second))
    student, objective = en.load("nano"), Objective.of(Distill())
    plain = ModelTeacher.load(student, objective, str(second))
    adapted = ModelTeacher.load(student, objective, None, str(tmp_path / "adapter"))
    assert (
        adapted.reads == "student" and ModelTeacher.load(student, Objective.of(SDPO()), str(second)).reads == "feedback"
    )
    difference = adapted._hidden(ROWS) - plain._hidden(ROWS)
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        ({"kind": "model"}, "teacher.model: is required for kind 'model'"),
        ({"kind": "endpoint"}, "teacher.url: is required for kind 'endpoint'"),
        ({"kind": "live", "model": "nano"}, "teacher.model: has no meaning for 'live'; use 'model' or 'endpoint'"),
        ({"kind": "model", "model": "nano", "mix": 0.5}, "teacher.mix: has no meaning for 'model'"),
        ({"kind": "endpoint", "url": "localhost:8000"}, "teacher.url: must match"),
    ],
)
def test_keys_that_do_not_fit_their_kind_are_refused(second: Path, teacher: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_mapping(recipe(second, teacher=teacher))
