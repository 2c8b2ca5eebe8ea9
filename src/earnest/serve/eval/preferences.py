"""What the automated users want, in YAML.

preferences:
  - name: warm
    feedback: Warmer please.
    verifier: {any_of: [dear, friend, glad]}
    pairs: [{prompt: …, chosen: …, rejected: …}]
    prompts: […]            # asked while learning
    probes: […]             # asked to measure, never learned from
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from earnest.config.schema import Strict, Whole
from earnest.errors import ConfigError, nearest
from earnest.serve.eval.verifiers import Verifier
from earnest.serve.learning import PairConfig

NonEmptyText = Annotated[str, Field(min_length=1)]


class UserPreference(Strict):
    """One thing that a user wants."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
    feedback: NonEmptyText = Field(description="the feedback on an answer that does not comply")
    verifier: Verifier
    pairs: list[PairConfig] = Field(min_length=1)
    prompts: list[NonEmptyText] = Field(min_length=1, description="asked while learning, round by round")
    probes: list[NonEmptyText] = Field(min_length=1, description="asked to measure; never learned from")

    @model_validator(mode="after")
    def _held_out(self) -> UserPreference:
        known = set(self.prompts) & {*self.probes, *(p.prompt for p in self.pairs)}
        if known:
            raise ConfigError(
                f"{self.name}: {sorted(known)[0]!r} is both a training prompt and a probe; probes must be held out."
            )
        return self


class Question(Strict):
    """A capability question: it counts as right if the right answer is the likeliest of the allowed ones."""

    prompt: NonEmptyText
    allowed: list[NonEmptyText] = Field(min_length=2)
    answer: NonEmptyText


class FeedbackEvalConfig(Strict):
    """A whole evaluation."""

    preferences: list[UserPreference] = Field(min_length=1)
    capability: list[Question] | None = Field(None, description="none: the probes that come with earnest")
    rounds: Whole = Field(6, description="rounds of feedback for each preference")
    per_round: Whole = Field(8, description="prompts per round")
    samples: Whole = Field(2, description="answers to each probe")
    max_tokens: Whole = Field(24)
    temperature: float = Field(1.0, ge=0, le=2)
    questions: Whole = Field(16, description="how many capability questions are asked")
    learn: dict[str, Any] = Field(default_factory=dict, description="settings that differ from the server's own")

    @model_validator(mode="after")
    def _names(self) -> FeedbackEvalConfig:
        names = [p.name for p in self.preferences]
        if len(set(names)) < len(names):
            raise ConfigError("preferences: two have the same name; each needs its own.")
        return self

    def asked(self) -> list[Question]:
        if self.capability is not None:
            return self.capability[: self.questions]
        from earnest.data import probes

        return [Question.model_validate(p) for p in probes()[: self.questions]]


def read(path: Path | None, overrides: dict[str, Any], only: Sequence[str] = ()) -> FeedbackEvalConfig:
    """The file, or the preferences for nano that come with earnest; an override of None changes nothing.

    ``only`` keeps the preferences of these names.
    """
    from earnest.config.loading import check_mapping
    from earnest.config.text import parse, parse_file

    if path is None:
        data = parse((resources.files(__package__) / "nano.yaml").read_text(encoding="utf-8"), "nano.yaml")
    else:
        data = parse_file(path)
    config = check_mapping(FeedbackEvalConfig, {**data, **{k: v for k, v in overrides.items() if v is not None}})
    known = [p.name for p in config.preferences]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: there is no such preference; {nearest(unknown[0], known)}")
    chosen = [p for p in config.preferences if not only or p.name in only]
    return config.model_copy(update={"preferences": chosen})
