"""Every key of a recipe: its type, its range, its default and its meaning. ``loop`` has those of the training loop.

Unknown keys are errors at every depth, and types are strict: a text is not taken for a number. The keys of terms,
adapters, optimizers, guards and sampling are the settings of their classes (``kinds``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from earnest import plugins
from earnest.adapters.variant import VARIANTS, Variant
from earnest.config.kinds import Kinded, Strict, Whole, key_of
from earnest.config.loop import LoopConfig, TaskConfig
from earnest.config.replicas import SyncConfig, plan
from earnest.config.teacher import TeacherConfig
from earnest.config.text import absolute, map_texts
from earnest.data.dataset import DataSettings
from earnest.engines.optimizers import OPTIMIZERS, Optimizer
from earnest.errors import ConfigError
from earnest.guards.assemble import Extraction
from earnest.guards.gates import At, Gate, Rule
from earnest.objectives.base import Objective, Term, Weighted
from earnest.objectives.registry import OBJECTIVES
from earnest.registry import Registry
from earnest.settings import make
from earnest.tasks import from_data


class TermConfig(Kinded[Term]):
    """One term of the loss; ``earnest objectives`` lists the kinds and their fields."""

    kind: str = Field(description="which term; `earnest objectives` lists them")
    weight: float = Field(1.0, description="the factor of its loss; 0: the term is not computed, and reports list it")
    name: str | None = Field(None, description="its name in the report; none: its kind. Unique in an objective")

    @classmethod
    def registry(cls) -> Registry[type[Term]]:
        return OBJECTIVES

    @classmethod
    def known_fields(cls) -> list[str]:
        return []  # a term's key needs its place in the list, which a suggestion does not know

    def values(self) -> Mapping[str, Any]:
        return self.fields | {"name": self.name}


class AdapterConfig(Kinded[Variant]):
    """The adapter that is trained; ``earnest adapters`` lists the kinds and their fields."""

    kind: str = Field(description="which adapter; `earnest adapters` lists them")
    targets: str | list[str] | None = Field(
        None, description="linear layers by name, `all-linear`, or `re:…`; none: the kind's usual ones (full: all)"
    )
    layers: list[int] | None = Field(None, description="numbers of the blocks to adapt; none: all")
    modules_to_save: list[str] | None = Field(
        None, description="modules trained whole besides the adapter, such as `embed_tokens`, `lm_head`"
    )

    @classmethod
    def registry(cls) -> Registry[type[Variant]]:
        return VARIANTS


class OptimizerConfig(Kinded[Optimizer]):
    """The optimizer: how a gradient becomes an update."""

    kind: str = Field(
        "adamw", description="`adamw`, `adamw8bit`, `sgd`, `muon`, or an optimizer that `import` registers"
    )
    max_grad_norm: float | None = Field(1.0, gt=0, description="the gradient is clipped to this norm; none: never")

    @classmethod
    def registry(cls) -> Registry[type[Optimizer]]:
        return OPTIMIZERS


class SamplerConfig(Strict):
    """Samplers outside this process; ``sampler: http://…`` is short for its ``url``."""

    url: str | None = Field(
        None,
        pattern=r"^((https?|s3|gs|az)://[^\s@]+|file:///[^\s]+)$",
        description="of an `earnest serve`, vLLM or SGLang server; or a bucket (s3://…, gs://…, az://…, file:///…) "
        "that `earnest sampler` processes read; none: processes of this machine, if staleness is above 0",
    )
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="a port of this machine (0: any free one) where the run starts an `earnest serve` that samples for "
        "it, and for other programs at /inference/v1/generate; none: no server",
    )
    count: Whole = Field(1, description="number of processes on this machine or on a bucket; a server counts as one")
    staleness: int = Field(
        0,
        ge=0,
        description="versions that the weights of a rollout may be older than the trainer's; 0: sampling and training "
        "take turns; above 0: samplers work while the trainer trains",
    )
    partial: Literal["finish", "continue", "restart"] = Field(
        "finish",
        description="what happens to completions under way when new weights arrive: finish under the old ones, "
        "continue under the new ones, or restart",
    )
    folder: str | None = Field(
        None,
        min_length=1,
        description="a folder that vLLM or SGLang reads under the same path; `earnest serve` needs none",
    )
    key: str = Field(
        "EARNEST_SAMPLER_KEY", min_length=1, description="the environment variable with the server's API key, if any"
    )
    timeout: float = Field(600.0, gt=0, description="seconds that a request may take")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return {"url": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _agree(self) -> SamplerConfig:
        server = self.url is not None and self.url.startswith("http")
        meant = {
            "folder": (server, "a server at sampler.url"),
            "key": (server, "a server at sampler.url"),
            "timeout": (self.url is not None, "sampler.url"),
            "partial": (self.staleness > 0, "staleness above 0"),
            "count": (
                not server and self.port is None and (self.url is not None or self.staleness > 0),
                "a bucket, or staleness above 0",
            ),
        }
        if self.port is not None and self.url is not None:
            raise ConfigError("sampler.port: sampler.url names a sampler already; leave one of the two out")
        for name, (has_meaning, what) in meant.items():
            if not has_meaning and self.changed(name):
                raise ConfigError(f"sampler.{name}: has a meaning only with {what}; leave it out")
        return self


class GuardConfig(Strict):
    """The part of every update that must not be learned: directions from a file, or made from contrastive triples."""

    kind: Literal["erase", "route"] = Field(
        description="`erase`: remove the unwanted part of each update; `route`: put it into a quarantine, which the "
        "deployed policy leaves out"
    )
    directions: str | None = Field(None, min_length=1, description="a file that `Directions.save` wrote")
    triples: str | None = Field(None, min_length=1, description="JSONL of prompt, unwanted and wanted completion")
    gate: Gate = key_of(Rule, "gate")
    overshoot: float = key_of(Rule, "overshoot")
    preserve: bool = key_of(Rule, "preserve")
    at: At = key_of(Rule, "at")
    top: int = key_of(Extraction, "top")
    floor: float = key_of(Extraction, "floor")
    refresh: int = key_of(Rule, "every")

    @model_validator(mode="after")
    def _agree(self) -> GuardConfig:
        if (self.directions is None) == (self.triples is None):
            raise ConfigError("guard: give directions (a file of them) or triples (to make them from), one of the two")
        if self.refresh and self.triples is None:
            raise ConfigError("guard.refresh: needs triples to extract the directions from")
        return self


class EngineConfig(Strict):
    """Where the steps run; see docs/tinker.md."""

    kind: Literal["local", "tinker"] = Field("local", description="PyTorch here, or a Tinker service")
    base_url: str | None = Field(
        None, min_length=1, description="tinker: the service; none: TINKER_BASE_URL. The key is in TINKER_API_KEY"
    )
    estimator: Literal["exact", "sampled"] = Field(
        "exact",
        description="how divergences are computed: exactly over the vocabulary or its top K, or estimated per sampled "
        "token as an advantage",
    )
    pack: bool | None = Field(
        None,
        description="pack rows without padding and compute common beginnings (prompts) once; none: where that is exact "
        "and cheaper",
    )
    packed_attention: Literal["sdpa", "flex"] | None = Field(
        None,
        description="attention of packed rows: sdpa (with a mask) or flex; none: flex on GPUs where it passes a test, "
        "sdpa elsewhere",
    )
    shard: Whole = Field(
        1,
        description="ranks that hold one base, each 1/N of its weights; torchrun starts shard × replicate × tensor of "
        "them",
    )
    replicate: Whole = Field(1, description="copies of the sharded base; each trains on its own rows")
    tensor: Whole = Field(
        1, description="ranks that compute the same rows, each with 1/K of every layer of the model's tp_plan"
    )
    offload: bool = Field(False, description="keep the sharded base in CPU memory between its uses (GPUs only)")
    checkpoint_activations: bool = Field(
        False, description="keep only the inputs of each layer and compute the rest again in the backward pass"
    )

    compile: bool = Field(
        False, description="compile each layer for training (torch.compile); a step's `layout` names a reason if not"
    )

    @model_validator(mode="after")
    def _agree(self) -> EngineConfig:
        if self.compile and (self.shard > 1 or self.tensor > 1):
            key = "shard" if self.shard > 1 else "tensor"
            raise ConfigError(f"engine.compile: compiled layers are not tested with shards; set engine.{key}=1")
        if self.offload and self.shard == 1:
            raise ConfigError("engine.offload: moves the shards of a base; set engine.shard to 2 or more")
        layout = ("pack", "packed_attention", "shard", "replicate", "tensor", "offload", "checkpoint_activations")
        if self.kind == "tinker" and (given := self.changed(*layout, "compile")):
            raise ConfigError(f"engine.{given[0]}: with engine.kind tinker the service lays out its work; leave it out")
        if self.base_url is not None and self.kind == "local":
            raise ConfigError("engine.base_url: has no meaning for a local engine; set engine.kind=tinker")
        return self

    @property
    def ranks(self) -> int:
        """The processes that train together."""
        return self.shard * self.replicate * self.tensor


def _absolute_code(text: str) -> str:
    """``my_file.py:name`` with its absolute path; a rubric with line breaks or a URL is no such place."""
    return plugins.absolute(text) if "\n" not in text else text


class RunConfig(LoopConfig):
    """A whole run."""

    description: str = Field("", description="one sentence about the recipe, for `earnest recipes`")
    imports: list[str] = Field(
        default_factory=list,
        alias="import",
        description="files and modules of your own that register terms, adapters, tasks or optimizers",
    )
    model: str = Field("nano", min_length=1, description="`nano`, `smollm2`, a Hugging Face id, or a folder")
    device: str = Field("auto", min_length=1, description="`auto` (CUDA, else MPS, else CPU) or a torch device")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "nf4"] = Field(
        "auto",
        description="precision of the base model; `int8` and `nf4` store its linear layers in 8 or 4 bits (QLoRA)",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; none: torch's choice, which a resumed run keeps")
    adapter: AdapterConfig
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="for a base model: a Jinja template, or a file with one; none: the tokenizer's own",
    )
    task: TaskConfig | None = Field(None, description="required, unless `data` has the rows of every term")
    data: DataSettings | None = Field(
        None,
        description="your own rows: a file, or a mapping with the settings of `earnest data`; none: the task's rows",
    )
    grade: Any = Field(
        None,
        description="with data of prompts and answers, instead of a task: `exact`, `numeric`, `math`, `contains`, "
        "`regex`, `json`, `judge`, `reward_model`, `my_rewards.py:score`, a mapping with `kind` and `weight`, or a "
        "list of these",
    )
    objective: list[TermConfig] = Field(min_length=1, description="the terms whose weighted sum is the loss")
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    guard: GuardConfig | None = Field(None, description="what must not be learned; none: no guard")
    engine: EngineConfig = Field(default_factory=EngineConfig)
    optimizer: OptimizerConfig = Field(default_factory=dict, validate_default=True)
    sampler: SamplerConfig | None = Field(
        None, description="the URL of a server or bucket that samples; none: this process samples"
    )
    micro_tokens: Whole = Field(8192, description="tokens in one micro-batch; changes memory, not the result")
    replicas: Whole = Field(1, description="processes that sample and train; they synchronize every sync.every updates")
    store: str | None = Field(
        None,
        min_length=1,
        description="shared by the replicas: s3://…, gs://…, az://… or file:///…; none: the run folder",
    )
    sync: SyncConfig = Field(default_factory=SyncConfig)
    repeat: int | list[int] | None = Field(
        None, description="train with this many seeds, from `seed` on, or with these: one run folder each in one folder"
    )

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs that this config describes."""
        if isinstance(self.repeat, int):
            return tuple(range(self.seed, self.seed + self.repeat))
        return (self.seed,) if self.repeat is None else tuple(self.repeat)

    @property
    def replicated(self) -> bool:
        """Whether this run has replicas or a bucket."""
        return self.replicas > 1 or self.store is not None

    @model_validator(mode="before")
    @classmethod
    def _task_of_the_data(cls, data: Any) -> Any:
        """``data`` and ``grade`` become the task that they describe."""
        if not isinstance(data, dict) or data.get("grade") is None:
            return data
        rows, grader = data.get("data"), data["grade"]
        if rows is None:
            raise ConfigError("grade: grades the rows of a file; give it as data: {train: questions.jsonl}")
        if data.get("task") is not None:
            raise ConfigError("task: data and grade are the task already; leave task out, or set task=null")
        rows = {"train": rows} if isinstance(rows, str) else rows
        if not isinstance(rows, dict):
            raise ConfigError(f"data: must be a file or a mapping with train, got {rows!r}")
        places = {key: absolute(rows[key]) for key in ("train", "heldout") if isinstance(rows.get(key), str)}
        grader = from_data.on_device(map_texts(_absolute_code, grader), data.get("device", "auto"))
        task = {"name": from_data.NAME, **rows, **places, "grade": grader}
        return {key: value for key, value in data.items() if key not in ("data", "grade")} | {"task": task}

    @field_validator("imports")
    @classmethod
    def _import(cls, entries: list[str]) -> list[str]:
        """Import the user's own code. Fields are validated in their order, so this runs before kinds are looked up."""
        return [plugins.load(entry) for entry in entries]

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, given: str | None) -> str | None:
        """Replace a file's name by its content, so that the run folder has the whole template."""
        if given is None or "{" in given:
            return given
        try:
            return Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{given!r} is neither a Jinja template nor a file that can be read ({error})") from None

    @field_validator("data", mode="before")
    @classmethod
    def _settings_of_data(cls, given: Any) -> Any:
        """``data: FILE`` is short for ``data: {train: FILE}``."""
        given = {"train": given} if isinstance(given, str) else given
        if not isinstance(given, dict):
            return given
        places = {key: absolute(given[key]) for key in ("train", "heldout") if isinstance(given.get(key), str)}
        return make(DataSettings, given | places)

    @field_validator("optimizer", mode="before")
    @classmethod
    def _rate_of_the_adapter(cls, given: Any, info: ValidationInfo) -> Any:
        """Without ``optimizer.lr`` AdamW takes the adapter's own rate."""
        adapter = info.data.get("adapter")  # absent if it is wrong; its own validation reports that
        if (
            adapter is None
            or not isinstance(given, dict)
            or "lr" in given
            or given.get("kind", "adamw") not in ("adamw", "adamw8bit")
        ):
            return given
        return {**given, "lr": adapter.build().lr}

    @model_validator(mode="after")
    def _agree(self) -> RunConfig:
        objective = self.build_objective()
        if self.task is None and self.data is None:
            raise ConfigError("task: is required; give a task, or your own rows with data: FILE")
        if self.task is None and (self.sampling.workers or self.sampler is not None):
            raise ConfigError(
                "task: is required with sampling.workers and sampler, which sample its prompts; give "
                "one, or train on your own rows in one process"
            )
        if not any(True for _ in objective.live()):
            raise ConfigError(
                f"objective: no term has a weight other than 0 ({', '.join(objective.skipped)}), so nothing would be "
                "trained; give one of them a weight"
            )
        for weighted in objective.terms:
            for name in weighted.term.of_rounds():
                raise ConfigError(
                    f"objective: {weighted.term.label}.{name} acts over several rounds, and a run has one; "
                    "leave it out, or use `earnest run heal`, whose loop has rounds"
                )
        if self.sampling.workers and self.sampler is not None and (self.sampler.url or self.sampler.port is not None):
            raise ConfigError("sampler: sampling.workers are samplers too; leave one of the two out")
        if self.dtype in ("int8", "nf4") and self.engine.ranks > self.engine.replicate:
            raise ConfigError(
                f"dtype: a base in {self.dtype} is not sharded; set engine.shard=1 and engine.tensor=1 "
                "(engine.replicate may be more), or dtype=bfloat16"
            )
        self._check_staleness()
        if self.sampler is not None and self.engine.kind != "local":
            raise ConfigError("sampler: a Tinker service samples itself; leave sampler out, or set engine.kind=local")
        if self.replicated and self.on_stall == "stop":
            raise ConfigError("on_stall: replicas train elsewhere, so the watch can only warn; set on_stall=warn")
        if self.replicated and self.best is not None:
            raise ConfigError("best: replicas keep no checkpoints in the run folder; leave it out, or use replicas=1")
        if self.repeat is not None:
            if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
                raise ConfigError(f"repeat: needs two or more different seeds of 0 or more, got {self.repeat}")
            if self.replicated:
                raise ConfigError("repeat: replicas are started for one run at a time; leave repeat or replicas out")
        if self.replicated:
            plan(self)
        elif self.sync != SyncConfig():
            raise ConfigError("sync: has no meaning for one replica without a store; set replicas=2, or leave it out")
        return self

    def _check_staleness(self) -> None:
        """Raise if samplers cannot work ahead of the trainer as far as ``sampler.staleness`` allows."""
        stale = 0 if self.sampler is None else self.sampler.staleness
        if stale and stale < self.updates_per_batch:
            raise ConfigError(
                f"sampler.staleness: training a batch adds {self.updates_per_batch} versions (updates_per_batch), so "
                f"{stale} leaves no room to sample ahead; set at least {self.updates_per_batch}, or 0"
            )
        if stale and self.replicated:
            raise ConfigError("sampler.staleness: replicas sample and train in turns; set it to 0, or replicas to 1")

    def build_objective(self) -> Objective:
        """The objective of the list of terms. Raises if two terms have the same name."""
        return Objective(tuple(Weighted(term.weight, term.build()) for term in self.objective))
