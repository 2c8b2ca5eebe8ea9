"""How adapters learn: the keys of a recipe, for feedback instead of a task."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from earnest.config.schema import AdapterConfig, OptimizerConfig, Strict, TeacherConfig, TermConfig, Whole
from earnest.errors import ConfigError
from earnest.serve.rows import AdapterRow
from earnest.serve.settings import LearnLimits
from earnest.serve.store import PUSHED, ServerStore

PROMPTS = (
    "Hello!",
    "Describe the sea.",
    "Tell me about the winter.",
    "What do you think of the moon?",
    "Give advice about the garden.",
    "Say something about the bread.",
)


class PairConfig(Strict):
    """Two answers to one prompt, the first of which should become the likelier one."""

    prompt: str = Field(min_length=1)
    chosen: str = Field(min_length=1)
    rejected: str = Field(min_length=1)


class ThumbsConfig(Strict):
    """The text that a teacher reads for a thumb."""

    up: str = Field("Good answer.", min_length=1)
    down: str = Field("Bad answer.", min_length=1)


class GateConfig(Strict):
    """The limits that a version must keep to become live. Collapse is measured against the base model."""

    pairs: list[PairConfig] = Field(
        default_factory=list,
        description="held out: feedback on their prompts is not learned from; none: no margin is judged",
    )
    margin: float = Field(
        0.5, ge=0, description="nats per pair by which the held-out margin may fall below the live version's"
    )
    prompts: list[str] = Field(default_factory=lambda: list(PROMPTS), min_length=1, description="probes for collapse")
    samples: int = Field(3, ge=2, description="completions of each probe")
    max_new_tokens: Whole = Field(16, description="length of a probe's completion")
    entropy_ratio: float = Field(0.5, ge=0, description="least entropy of the probes' answers, relative to the base's")
    entropy_most: float = Field(3.0, gt=0, description="largest entropy of them, relative to the base's")
    self_similarity: float = Field(0.85, gt=0, le=1, description="largest ROUGE-L between answers to one probe")
    drift: float = Field(
        2.0, gt=0, description="how far the log-probs of the base's own answers may move, in nats per token"
    )


class LearnConfig(Strict):
    """A version is made from at most ``batch`` feedbacks, in their order."""

    adapter: AdapterConfig = Field(default_factory=lambda: AdapterConfig.model_validate({"kind": "lora", "rank": 8}))
    objective: list[TermConfig] = Field(
        default_factory=lambda: [TermConfig.model_validate({"kind": "sdpo"})],
        min_length=1,
        description="the terms whose weighted sum is the loss",
    )
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig.model_validate({"lr": 1e-3}))
    batch: Whole = Field(8, description="feedbacks in one version, at most")
    updates: Whole = Field(4, description="optimizer steps on them")
    micro_tokens: Whole = Field(256, description="padded tokens in one forward pass; a chat waits for at most one pass")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the adapter's initialization")
    thumbs: ThumbsConfig = Field(default_factory=ThumbsConfig)
    audit: Literal["alive", "full"] = Field(
        "alive", description="laws checked on every update: `alive` (every term and parameter gets a gradient), or all"
    )
    gate: GateConfig = Field(default_factory=GateConfig)

    @model_validator(mode="after")
    def _agree(self) -> LearnConfig:
        if self.adapter.build().wants_calibration():
            raise ConfigError(
                f"adapter: {self.adapter.kind} reads data at initialization, which a server lacks; use lora or dora."
            )
        self.build_objective()
        return self

    def build_objective(self) -> Any:
        """The objective that the list of terms describes."""
        from earnest.objectives import Objective, Weighted

        return Objective(tuple(Weighted(term.weight, term.build()) for term in self.objective))


def read(path: Path | None) -> LearnConfig:
    """The server's own settings, from a YAML file or the defaults."""
    from earnest.config.loading import check_mapping
    from earnest.config.text import parse_file

    if path is None:
        return LearnConfig()
    found = parse_file(path)
    try:
        return check_mapping(LearnConfig, found)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def overridden(config: LearnConfig, changes: Mapping[str, Any]) -> LearnConfig:
    """The settings of one adapter: the server's, with a client's changes. A list or a kind is replaced as a whole.
    Regular expressions are refused: Python's engine needs exponential time for some, and holds every thread
    meanwhile."""
    from earnest.config.loading import check_mapping

    adapter = changes.get("adapter")
    targets = adapter.get("targets") if isinstance(adapter, Mapping) else None
    for target in targets if isinstance(targets, list) else [targets]:
        if isinstance(target, str) and target.startswith("re:"):
            raise ConfigError(
                f"adapter.targets: {target[:80]!r} is a regular expression, which this server takes from its own "
                "--learn file only; list the names of the layers, or write 'all-linear'."
            )
    return check_mapping(LearnConfig, _merged(config.model_dump(mode="python"), changes))


def check_limits(config: LearnConfig, own: LearnConfig, limits: LearnLimits) -> None:
    """Refuse what is above the limits, unless the server's ``own`` settings have as much."""
    served = _sizes(own)
    for name, size in _sizes(config).items():
        most = max(getattr(limits, name), served[name])
        if size > most:
            raise ConfigError(f"learn: {name} is {size}; this server allows at most {most}. Set a lower value.")


def made_with(store: ServerStore, row: AdapterRow) -> Mapping[str, Any]:
    """The settings that the live version was made with; none for version 0 and for an adapter that was pushed."""
    known = row.live > 0 and row.origin != PUSHED
    return store.version(row, row.live).record.get("config", {}) if known else {}


def check_adapter(row: AdapterRow, made: Mapping[str, Any], config: LearnConfig) -> None:
    """Refuse settings of another adapter than the live version's (``made``: its settings; empty: any will do)."""
    old = AdapterConfig.model_validate(made["adapter"]).model_dump() if made else {}
    new = config.adapter.model_dump()
    other = [key for key in {**old, **new} if old.get(key) != new.get(key)] if made else []
    if other:
        raise ConfigError(
            f"version {row.live} of {row.name} was made with adapter.{other[0]} {old.get(other[0])}, the settings have "
            f"{new.get(other[0])}, and each version continues the weights of the one before; give the earlier adapter "
            "in --learn, make a new adapter for the new settings, or begin again from the base with "
            f'POST /v1/adapters/{row.name}/rollback {{"version": 0}}.'
        )


def _sizes(config: LearnConfig) -> dict[str, int]:
    """What each limit bounds, as the settings have it."""
    gate = config.gate
    texts = [*gate.prompts, *(t for p in gate.pairs for t in (p.prompt, p.chosen, p.rejected))]
    numbers = [v for k, v in config.adapter.fields.items() if isinstance(v, int) and "seed" not in k]
    sizes = {name: getattr(config, name) for name in ("updates", "batch", "micro_tokens")}
    sizes |= {name: getattr(gate, name) for name in ("samples", "max_new_tokens")}
    sizes |= {"rank": max(numbers, default=0), "terms": len(config.objective)}
    sizes |= {"prompts": len(gate.prompts), "pairs": len(gate.pairs)}
    return sizes | {"characters": max(map(len, [*texts, config.thumbs.up, config.thumbs.down]))}


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(dict(old))
    for key, value in new.items():
        inside = found.get(key)
        other_kind = isinstance(value, Mapping) and "kind" in value
        if isinstance(value, Mapping) and isinstance(inside, dict) and not other_kind:
            found[key] = _merged(inside, value)
        else:
            found[key] = copy.deepcopy(value)
    return found
