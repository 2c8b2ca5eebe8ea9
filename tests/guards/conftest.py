"""A random two-layer model with the δS adapter, a batch, and directions extracted on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import earnest as en
from earnest.engines import LogProbsWanted
from earnest.guards import Directions, Triple, directions_from_gradients
from earnest.signals.batch import Batch
from tests.runs.tiny import tiny_folder

DELTA_S = {"rank": None, "block": 0, "gain": "delta"}
Make = Callable[..., en.LocalEngine]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("guards") / "tiny")


@pytest.fixture
def make(tiny: Path) -> Make:
    """Engines that differ only in the given settings."""

    def of(guard: Any = None, *, dtype: str = "float32", adapter: Any = None, **settings: Any) -> en.LocalEngine:
        policy = en.load(tiny, dtype=dtype)
        settings = {"optimizer": en.AdamW(lr=0.02)} | settings
        attached = en.attach(policy, adapter or en.AntiPaSTO(**DELTA_S), targets=("q_proj", "v_proj"), seed=0)
        return en.LocalEngine(policy, attached, guard=guard, **settings)

    return of


def triples(count: int = 12) -> list[Triple]:
    """Unwanted replies end in an exclamation mark, wanted ones in a full stop."""
    words = ["up", "down", "left", "right"]
    return [
        Triple(
            ({"role": "user", "content": f"say {words[i % 4]} {i}"},),
            f"{words[i % 4]}{i % 3}!",
            f"{words[i % 4]}{i % 3}.",
        )
        for i in range(count)
    ]


@pytest.fixture
def data(tiny: Path, tmp_path: Path) -> dict[str, Any]:
    """A guarded recipe on the tiny model, with its triples in a file."""
    lines = [{"prompt": list(t.prompt), "unwanted": t.unwanted, "wanted": t.wanted} for t in triples()]
    (tmp_path / "triples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {
        "model": str(tiny),
        "task": "style/volume",
        "adapter": {"kind": "antipasto", **DELTA_S, "targets": ["q_proj", "v_proj"]},
        "objective": [{"kind": "grpo"}],
        "optimizer": {"kind": "adamw", "lr": 0.05},
        "sampling": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 12},
        "steps": 4,
        "eval": {"every": 0, "prompts": 3, "samples": 2},
        "threads": 1,
        "guard": {"kind": "route", "triples": str(tmp_path / "triples.jsonl"), "refresh": 3},
    }


@pytest.fixture
def directions(make: Make) -> Directions:
    return directions_from_gradients(make(), triples(), en.GRPO(), top=3)


@pytest.fixture(scope="session")
def batches(tiny: Path) -> list[Batch]:
    """Rows of random tokens; the base's own log-probs as behaviour, so that few ratios are clipped."""
    policy = en.load(tiny)
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=1)))
    found = []
    for number in range(50):
        rng = torch.Generator().manual_seed(number)
        rows = [torch.randint(6, 60, (8,), generator=rng).tolist() for _ in range(4)]
        batch = Batch.from_rows(
            [r[:4] for r in rows],
            [r[4:] for r in rows],
            group=[0, 0, 1, 1],
            advantages=torch.randn(4, generator=rng).tolist(),
        )
        found.append(batch.with_signals(behaviour=engine.score(batch, LogProbsWanted())))
    return found
