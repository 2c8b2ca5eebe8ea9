"""The keys of ``teacher:``, and the teacher that they describe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from earnest.config.kinds import Strict
from earnest.config.text import absolute
from earnest.errors import ConfigError
from earnest.objectives.base import Objective

KINDS_WITH: dict[str, tuple[str, ...]] = {
    "mix": ("ema", "trust_region"),
    "model": ("model", "endpoint"),
    "adapter": ("model",),
    "url": ("endpoint",),
    "key": ("endpoint",),
    "prompt": ("model", "endpoint"),
}


class TeacherConfig(Strict):
    """The teacher of terms that read one: the policy with a solution and feedback in its prompt, or another model."""

    kind: Literal["live", "base", "ema", "trust_region", "model", "endpoint"] = Field(
        "live",
        description="`live`: the current policy; `base`: the adapter off; `ema`: a moving average of the adapter; "
        "`trust_region`: an interpolation of the live and the base logits; `model`: another model in this process; "
        "`endpoint`: a vLLM or `earnest serve`",
    )
    mix: float | None = Field(
        None,
        gt=0,
        le=1,
        description="ema: share of the new ΔW in each update (none: 0.05); trust_region: share of live (none: 0.5)",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="model: a name, id or folder with the student's tokenizer; endpoint: a model that it serves",
    )
    adapter: str | None = Field(None, min_length=1, description="model: a run folder or adapter folder to load on it")
    url: str | None = Field(
        None, pattern=r"^https?://[^\s@]+$", description="endpoint: its address, such as http://localhost:8000"
    )
    key: str | None = Field(
        None, min_length=1, description="endpoint: the variable with its API key; none: EARNEST_TEACHER_KEY"
    )
    prompt: Literal["student", "feedback"] | None = Field(
        None,
        description="model, endpoint: what it reads: each row's own prompt, or that with a solution and feedback; "
        "none: feedback if a term is sdpo",
    )

    @field_validator("adapter", "model")
    @classmethod
    def _found_from_anywhere(cls, given: str | None) -> str | None:
        return None if given is None else absolute(given)

    @model_validator(mode="after")
    def _agree(self) -> TeacherConfig:
        for name, kinds in KINDS_WITH.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise ConfigError(
                    f"teacher.{name}: has no meaning for {self.kind!r}; use {' or '.join(map(repr, kinds))}, or leave "
                    "it out"
                )
        if self.kind == "model" and self.model is None and self.adapter is None:
            raise ConfigError("teacher.model: is required for kind 'model'; give a name, an id or a folder")
        if self.kind == "endpoint" and self.url is None:
            raise ConfigError("teacher.url: is required for kind 'endpoint', such as http://localhost:8000")
        return self

    @property
    def outside(self) -> bool:
        """Whether the teacher is another model than the policy that is trained."""
        return self.kind in ("model", "endpoint")

    def build(self, adapter: Any) -> Any:
        """The teacher on this adapter, where the policy teaches itself."""
        from earnest.signals import BaseTeacher, EMATeacher, LiveTeacher, TrustRegionTeacher

        mix = () if self.mix is None else (self.mix,)
        if self.kind == "ema":
            return EMATeacher(adapter, *mix)
        return {"live": LiveTeacher, "base": BaseTeacher, "trust_region": TrustRegionTeacher}[self.kind](*mix)

    def build_outside(self, student: Any, objective: Objective, **how: Any) -> Any:
        """Another model as the teacher of ``student``; ``how`` goes to ``ModelTeacher.load``."""
        if self.kind == "endpoint":
            from earnest.engines.endpoint_teacher import ServedTeacher

            assert self.url is not None, "required"
            return ServedTeacher.connect(
                student, objective, self.url, reads=self.prompt, model=self.model, key=self.key
            )
        from earnest.engines.model_teacher import ModelTeacher

        return ModelTeacher.load(student, objective, self.model, self.adapter, reads=self.prompt, **how)
