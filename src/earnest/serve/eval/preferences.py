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

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from earnest.config.schema import Strict, Whole
from earnest.errors import ConfigError, nearest
from earnest.serve.learning import PairConfig

_SENTENCE = re.compile(r"[^.!?]+[.!?]*")


class Verifier(Strict):
    """All given rules must hold; at least one is given."""

    any_of: list[str] = Field(default_factory=list, description="one of these is in the answer (case does not matter)")
    none_of: list[str] = Field(default_factory=list, description="none of these is")
    pattern: str | None = Field(None, description="a regular expression that matches somewhere")
    most_words: int | None = Field(None, ge=1)
    least_words: int | None = Field(None, ge=1)
    most_sentences: int | None = Field(None, ge=1)
    ends_with: Literal["!", ".", "?"] | None = None

    @model_validator(mode="after")
    def _asks(self) -> Verifier:
        if self == Verifier.model_construct():
            raise ConfigError("verifier: it has no rule; give any_of, none_of, pattern, most_words, …")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ConfigError(f"verifier.pattern: {self.pattern!r} is not a regular expression: {error}") from None
        return self

    def holds(self, answer: str) -> bool:
        """Whether an answer complies; an empty answer never does."""
        low, words = answer.lower(), answer.split()
        if not words:
            return False
        sentences = [s for s in _SENTENCE.findall(answer) if s.strip()]
        return all(
            (
                not self.any_of or any(w.lower() in low for w in self.any_of),
                not any(w.lower() in low for w in self.none_of),
                self.pattern is None or re.search(self.pattern, answer) is not None,
                self.most_words is None or len(words) <= self.most_words,
                self.least_words is None or len(words) >= self.least_words,
                self.most_sentences is None or len(sentences) <= self.most_sentences,
                self.ends_with is None or answer.rstrip().endswith(self.ends_with),
            )
        )


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
