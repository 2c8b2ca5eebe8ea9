"""The keys of `earnest replay`: teachers, judge and filters."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from earnest.config import text
from earnest.config.loading import check_mapping
from earnest.config.schema import Strict, Whole
from earnest.errors import ConfigError
from earnest.replay.filters import Op


class PriceConfig(Strict):
    """The price of an endpoint."""

    input: float = Field(ge=0, description="dollars per million prompt tokens")
    output: float = Field(ge=0, description="dollars per million answer tokens")


class SpeakerConfig(Strict):
    """A model that answers: an endpoint, or a policy on this machine."""

    model: str = Field(
        "nano", min_length=1, description="the model's name at the endpoint, or a model of `earnest models`"
    )
    base_url: str | None = Field(
        None, min_length=1, description="address of an OpenAI-compatible endpoint, with /v1 at the end"
    )
    key: str = Field("OPENAI_API_KEY", min_length=1, description="environment variable with the endpoint's API key")
    price: PriceConfig | None = Field(None, description="prices for counting costs; none: tokens are counted")
    adapter: str | None = Field(None, min_length=1, description="a run folder or adapter on a local policy")

    def agree(self, where: str, endpoint: bool) -> None:
        """Raise if a field is set that this kind ignores."""
        if endpoint and self.base_url is None:
            raise ConfigError(f"{where}.base_url: an endpoint needs its address, e.g. http://127.0.0.1:8000/v1.")
        if endpoint and self.adapter is not None:
            raise ConfigError(f"{where}.adapter: an endpoint chooses its adapter by its model's name; leave it out.")
        if not endpoint and (self.base_url is not None or self.price is not None):
            raise ConfigError(
                f"{where}: base_url and price belong to an endpoint; set kind=endpoint, or leave them out."
            )


class TeacherEntry(SpeakerConfig):
    """One teacher: it gets a state of a trace and answers instead of the assistant."""

    kind: Literal["endpoint", "policy", "hindsight", "user"] = Field(
        "hindsight",
        description="an endpoint, a local policy, one that is shown what the user wrote afterwards, or the user who "
        "typed a better answer (the trace's meta.better)",
    )
    name: str | None = Field(
        None, pattern=r"^[\w.-]+$", description="its name in the pairs; none: its kind. Unique, and not `judge`"
    )
    temperature: float = Field(0.7, ge=0, description="0 is greedy")
    max_tokens: Whole = Field(256, description="longest answer, in tokens; a longer one is not used")
    samples: Whole = Field(1, description="answers per state")

    @model_validator(mode="after")
    def _agree(self) -> TeacherEntry:
        self.agree("teachers", self.kind == "endpoint")
        if self.name == "judge":
            raise ConfigError("teachers.name: `judge` is the judge's; take another.")
        if self.kind == "user" and (self.samples != 1 or self.adapter is not None or self.model != "nano"):
            raise ConfigError("teachers: kind 'user' asks no model; leave out model, adapter and samples.")
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError("teachers.samples: greedy answers are all the same; raise temperature, or ask for one.")
        return self

    @property
    def label(self) -> str:
        return self.name or self.kind


class JudgeConfig(SpeakerConfig):
    """Decides which of two answers is better."""

    kind: Literal["likelihood", "endpoint", "task", "teacher"] = Field(
        "likelihood",
        description="a local policy with hindsight, by mean log-prob; an endpoint that is asked twice, in both orders; "
        "a task's grader; or nobody, and the teacher is always right",
    )
    task: str | None = Field(None, min_length=1, description="task: whose grader; none: the trace's own meta.task")

    @model_validator(mode="after")
    def _agree(self) -> JudgeConfig:
        self.agree("judge", self.kind == "endpoint")
        if self.task is not None and self.kind != "task":
            raise ConfigError(f"judge.task: has no meaning for kind {self.kind!r}; leave it out, or set kind=task.")
        if self.kind in ("task", "teacher") and (self.adapter is not None or self.model != "nano"):
            raise ConfigError(f"judge: kind {self.kind!r} asks no model; leave out model and adapter.")
        return self


class FilterConfig(Strict):
    """One filter on the pairs."""

    op: str = Field(
        description="text_length, words, special_characters, character_repetition, word_repetition, "
        "exact_duplicates or near_duplicates"
    )
    field: Literal["prompt", "chosen", "rejected", "pair"] = Field("chosen", description="which text it reads")
    min: float | None = Field(None, description="the least value that stays")
    max: float | None = Field(None, description="the largest value that stays")
    n: int | None = Field(None, ge=1, description="length of the n-grams")
    threshold: float | None = Field(None, gt=0, le=1, description="near_duplicates: Jaccard similarity")

    def build(self) -> Op:
        given = {name: getattr(self, name) for name in ("min", "max", "n", "threshold")}
        return Op(self.op, self.field, {name: value for name, value in given.items() if value is not None})

    @model_validator(mode="after")
    def _agree(self) -> FilterConfig:
        self.build()
        return self


class LeakageConfig(Strict):
    """Drops prompts that a held-out set contains."""

    heldout: str = Field(min_length=1, description="task:NAME, or a .jsonl or .txt file")
    n: Whole = Field(8, description="words in an n-gram; a shorter prompt is compared as a whole")
    max: float = Field(
        0.5, ge=0, lt=1, description="the largest share of a prompt's n-grams that the held-out set may contain"
    )


class ReplayConfig(Strict):
    """A whole replay."""

    teachers: list[TeacherEntry] = Field(min_length=1)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    turns: Literal["all", "last"] = Field("all", description="which assistant turns of a trace are replayed")
    min_margin: float = Field(0.0, ge=0, description="a pair needs a larger margin than this; ties are never pairs")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the local policies' answers")
    concurrency: Whole = Field(8, description="requests to endpoints at a time")
    attempts: Whole = Field(5, description="tries of a request before it counts as failed")
    backoff: float = Field(1.0, gt=0, description="seconds before the second try; doubled each time, a minute at most")
    timeout: float = Field(120.0, gt=0, description="seconds to wait for an answer")
    max_errors: float = Field(0.1, ge=0, le=1, description="the job stops when a larger share of requests has failed")
    max_cost: float | None = Field(None, gt=0, description="dollars, over all sessions; the job stops above this cost")
    bad_lines: Literal["stop", "drop"] = Field(
        "stop", description="whether malformed lines of the traces stop the job or are only counted"
    )
    clean: list[FilterConfig] = Field(default_factory=list, description="filters, one after the other")
    leakage: LeakageConfig | None = Field(None, description="held-out prompts that no pair may contain")
    cleaner: Literal["auto", "built-in", "data-juicer"] = Field("auto", description="auto: data-juicer where installed")
    out: str = Field(
        "pairs.parquet", min_length=1, description="the file of pairs; its journal and report lie beside it"
    )

    @model_validator(mode="after")
    def _agree(self) -> ReplayConfig:
        labels = [teacher.label for teacher in self.teachers]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError(f"teachers: two are called {label!r}; give one of them a name.")
        if self.max_cost is not None and not any(s.price for s in (*self.teachers, self.judge)):
            raise ConfigError("max_cost: no endpoint has a price, so no cost is counted; give prices, or leave it out.")
        return self

    def asking(self) -> dict[str, Any]:
        """The settings that decide which requests are made; a journal belongs to them. Filters may change without new
        requests."""
        kept = ("teachers", "judge", "turns", "seed")
        return {name: value for name, value in self.model_dump(mode="json").items() if name in kept}


def read(path: Path | None, overrides: Sequence[str] = ()) -> ReplayConfig:
    """A YAML file, or the defaults where there is none, with ``key=value`` on top."""
    source = Path(str(resources.files("earnest.replay") / "default.yaml")) if path is None else path
    return check_mapping(ReplayConfig, text.parse_file(source), overrides)
