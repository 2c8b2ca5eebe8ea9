"""The teacher pool: stored exploiting rollouts with the log-probs that they were sampled with.

They are sampled from the trained policy of the unguarded arm of the first seed. The pool has those that the
checker passed and that contain an exploit. In each group a fixed share of the completions is replaced.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from earnest.disk import write_json
from earnest.engines import LocalEngine
from earnest.engines.base import Rollout
from earnest.errors import ConfigError
from earnest.models import SampleSpec
from earnest.seeds import derive
from earnest.tasks import Prompt, get_task, grade_all
from experiments.hacking.config import Config

DRAWS = 4
"""Completions of each prompt when the pool is filled."""


@dataclass(frozen=True)
class Pool:
    """Stored rollouts by the id of their prompt."""

    stored: Mapping[str, tuple[Rollout, ...]]
    asked: Mapping[str, Prompt]

    def prompts(self, config: Config, seed: int, step: int) -> list[Prompt]:
        """A step's prompts, among those that have a stored rollout."""
        rng = random.Random(derive(seed, "pool", step))
        return [self.asked[key] for key in rng.sample(sorted(self.asked), config.prompts_per_step)]

    def replace(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt], config: Config) -> list[Rollout]:
        """Replace the first completions of each group by stored ones; the share decides how many."""
        count = max(1, round(config.pool_share * config.completions_per_prompt))
        out = []
        for r in rollouts:
            stored = self.stored[prompts[r.prompt_index].id]
            if r.sample_index < count:
                given = stored[r.sample_index % len(stored)]
                r = replace(given, prompt_index=r.prompt_index, sample_index=r.sample_index)
            out.append(r)
        return out

    def write(self, path: Path) -> None:
        rows = [asdict(r) | {"id": key} for key, found in self.stored.items() for r in found]
        write_json(path, {"rollouts": rows, "prompts": [asdict(p) for p in self.asked.values()]})

    @classmethod
    def read(cls, path: Path) -> Pool:
        data = json.loads(path.read_text())
        found: dict[str, list[Rollout]] = defaultdict(list)
        for row in data["rollouts"]:
            found[row.pop("id")].append(_rollout(row))
        asked = {p["id"]: Prompt(p["id"], tuple(p["messages"]), p["data"]) for p in data["prompts"]}
        return cls({k: tuple(v) for k, v in found.items()}, asked)


def _rollout(row: dict[str, Any]) -> Rollout:
    lists = {k: tuple(row[k]) for k in ("prompt", "tokens", "logprobs")}
    spans = tuple((tokens, version) for tokens, version in row.get("continued", ()))
    return Rollout(**(row | lists | {"continued": spans}))


def fill(engine: LocalEngine, config: Config) -> Pool:
    """Sample the pool from the engine's policy."""
    task = get_task("holes")
    prompts = task.prompts("train", config.pool_prompts, derive(config.seed, "pool") % 2**31)
    spec = SampleSpec(max_new_tokens=config.max_new_tokens, temperature=1.0, seed=derive(config.seed, "pool sampling"))
    rollouts = engine.sample([engine.policy.render(p.messages) for p in prompts], DRAWS, spec)
    asked = [prompts[r.prompt_index] for r in rollouts]
    grades = grade_all(task, asked, [engine.policy.decode(r.tokens) for r in rollouts])
    found: dict[str, list[Rollout]] = defaultdict(list)
    for prompt, rollout, grade in zip(asked, rollouts, grades, strict=True):
        if grade.reward > 0 and grade.extras["attempted"]:
            found[prompt.id].append(rollout)
    if len(found) < config.prompts_per_step:
        raise ConfigError(
            f"the teacher exploited {len(found)} of {len(prompts)} prompts, a step needs {config.prompts_per_step}; "
            "train it longer (steps=), or raise pool_prompts=."
        )
    return Pool({k: tuple(v) for k, v in found.items()}, {p.id: p for p in prompts if p.id in found})
