"""The probe's bounds, with a real engine as the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from earnest.config import load_file
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.runs.setup import build
from earnest.sync.pool import SamplerPool
from earnest.sync.probe import TOLERANCE, WORST
from tests.runs.test_ahead import Elsewhere
from tests.runs.tiny import recipe, tiny_folder


class OneTokenOff(Elsewhere):
    """Its log-prob of a single token of the probe is off."""

    by = 0.0

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        found = super().score(rows)
        return [found[0] + self.by, *found[1:]]


def test_one_token_that_is_far_off_is_found_where_the_mean_is_not(tmp_path: Path) -> None:
    config = load_file(recipe(tmp_path / "recipe.yaml", tiny_folder(tmp_path / "tiny")), ["threads=1"])
    setup = build(config, lambda _: None)
    engine, task = setup.require_local("a test"), setup.task
    assert task is not None
    rows = [list(setup.policy.render(p.messages)) for p in task.prompts("heldout", 8, 0)]
    tokens, allowed = sum(len(r) - 1 for r in rows), TOLERANCE[engine.policy.dtype]
    member = OneTokenOff(0, config)
    pool = SamplerPool(engine, rows, [member])
    member.by = 2 * WORST * allowed
    assert member.by / tokens < allowed, "the mean alone would pass"
    with pytest.raises(SamplingError, match=r"and 0\.02 at one token; it runs other weights"):
        pool.sample(rows[:1], 1, SampleSpec(max_new_tokens=2))
    member.by = 0.0
    assert len(pool.sample(rows[:1], 1, SampleSpec(max_new_tokens=2))) == 1
    assert pool.metrics["sampler/probe"] <= pool.metrics["sampler/probe_max"] < 1e-4
