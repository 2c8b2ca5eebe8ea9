"""Rules that decide whether an answer is what the user wanted; no model judges."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from earnest.config.schema import Strict
from earnest.errors import ConfigError

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
