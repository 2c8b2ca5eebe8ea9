"""The evaluator: numbers from full logits, and models that are broken in different ways, none of which scores well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import earnest as en
from earnest import data
from earnest.steering import SteeringError, TraitEvaluator, Vector
from earnest.steering.evaluate import TraitEvaluation, _exp
from earnest.steering.sites import block_paths
from earnest.tasks.base import Task
from tests.steering.conftest import logits


@pytest.fixture
def evaluator(nano: en.Policy, warmth: Task) -> TraitEvaluator:
    return TraitEvaluator(nano, warmth, prompts=12, probes=8, texts=6, max_new_tokens=24)


def test_perplexity_and_mass_one_by_one(nano: en.Policy, evaluator: TraitEvaluator) -> None:
    nll = []
    for text in data.plain_heldout()[:6]:
        ids = nano.encode(text)
        lp = logits(nano, ids).double().log_softmax(-1)
        nll += [-float(lp[i, t]) for i, t in enumerate(ids[1:])]
    assert evaluator.perplexity() == pytest.approx(float(torch.tensor(nll).mean().exp()), rel=1e-3)
    allowed, right = [], []
    for probe in data.probes()[:8]:
        p = logits(nano, nano.render([{"role": "user", "content": probe["prompt"]}]))[-1].softmax(-1)
        one = {a: float(p[nano.encode(a)[0]]) for a in probe["allowed"]}
        allowed.append(sum(one.values()))
        right.append(one[probe["answer"]])
    mass, good = evaluator.choices()
    assert mass == pytest.approx(sum(allowed) / 8, abs=0.01) and good == pytest.approx(sum(right) / 8, abs=0.01)


def test_the_base_is_its_own_measure_and_a_prompt_is_a_baseline(evaluator: TraitEvaluator) -> None:
    base, again, told = evaluator.measure(), evaluator.measure(), evaluator.measure("Be warm.")
    assert base == again, "nothing random from call to call"
    assert base.fluency == pytest.approx(1.0) and base.sense == pytest.approx(1.0) and base.mass > 0.9
    assert told.trait > base.trait and told.sense > 0.8 and told.answers != base.answers


def test_a_broken_model_never_scores_well(nano: en.Policy, evaluator: TraitEvaluator) -> None:
    """Noise in the stream, a loop on one word, and nonsense with a perfect trait: each is below the floor."""
    generator = torch.Generator().manual_seed(0)
    path = block_paths(nano, [3])[0]
    noise = Vector({path: torch.randn(128, generator=generator)}, "noise", nano.fingerprint())
    head = nano.head.weight
    stuck = Vector({path: head[nano.encode(" friend")[-1]].detach().clone()}, "one word", nano.fingerprint())
    for vector, dose in ((noise, 60.0), (stuck, 400.0)):
        found = evaluator.measure(within=lambda v=vector, d=dose: v.applied(nano, d))
        assert found.coherence < evaluator.floor and found.score == 0, found
    looped = evaluator.measure(within=lambda: stuck.applied(nano, 400.0))
    assert looped.sense < 0.2, "a loop is likely to itself, and still makes no sense"


def test_the_floor_is_absolute_and_coherence_the_least_of_three() -> None:
    good = TraitEvaluation(1.0, 1.0, 0.9, 0.8, 3.0, 0.95, 0.85, 0.5, ())
    assert good.coherence == 0.85 and good.score == pytest.approx(0.85)
    for weak in ("mass", "fluency", "sense"):
        broken = replace(good, **{weak: 0.49})
        assert broken.coherence == 0.49 and broken.score == 0.0
    assert good.to_dict()["score"] == good.score


def test_a_perplexity_that_is_too_large_for_a_number_is_infinite() -> None:
    assert _exp(699.0) < _exp(700.0) == _exp(1e6) == float("inf")


def test_what_is_refused(nano: en.Policy, warmth: Task) -> None:
    with pytest.raises(SteeringError, match="floor is 0"):
        TraitEvaluator(nano, warmth, floor=0)
