"""A run whose steps are computed by a Tinker service: ``engine: {kind: tinker, base_url: …}``.

Every key of the config has its effect on the service, or an error here names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from earnest.adapters import LoRA
from earnest.config import RunConfig
from earnest.errors import ConfigError, SignalError
from earnest.models.catalog import served_name
from earnest.objectives import Objective
from earnest.tasks import Environment, Task

if TYPE_CHECKING:
    from earnest.runs.setup import Setup


def check(config: RunConfig, objective: Objective) -> None:
    """Refuse what a Tinker service cannot do, before the first request."""
    reasons = {
        "device": "the service chooses its own",
        "dtype": "the service chooses its own",
        "micro_tokens": "the service cuts batches itself",
        "guard": "a guard reads weights, which a service does not show",
        "chat_template": "the service's tokenizer has its own",
    }
    for key, why in reasons.items():
        if config.changed(key):
            raise ConfigError(f"{key}: with engine.kind tinker {why}; leave it out.")
    adapter, temperature, teacher = config.adapter, config.sampling.temperature, config.teacher
    elsewhere = adapter.targets is not None or adapter.layers is not None or adapter.modules_to_save
    for refused, message in (
        (config.check, "check: the laws read gradients, which a Tinker service does not show; set check: false, and "
            "audit the same recipe with engine.kind local."),
        (config.shares_every and len(list(objective.live())) > 1,
            "shares_every: shares are read from gradients, which a service does not show; set it to 0."),
        (temperature != 1, "sampling.temperature: a service's log-probs are at temperature 1, so ratios need samples "
            f"at 1, not {temperature:g}."),
        (config.replicated or config.sampling.workers,
            "replicas, store, sampling.workers: a Tinker service is its own cluster; leave them out."),
        (adapter.kind != "lora" or elsewhere, "adapter: a Tinker service trains a LoRA on all linear layers; use kind "
            "lora, without targets, layers and modules_to_save."),
        (config.optimizer.kind != "adamw",
            f"optimizer.kind: a Tinker service steps with adamw, not {config.optimizer.kind}."),
        (teacher.outside, f"teacher.kind: a Tinker service has no {teacher.kind} teacher; use live, base or ema."),
        (teacher.kind == "trust_region",
            "teacher.kind: trust_region mixes logits, which a service does not send; use live, base or ema."),
    ):  # fmt: skip
        if refused:
            raise ConfigError(message)
    from earnest.engines.tinker.engine import ALPHA

    variant = adapter.build()
    assert isinstance(variant, LoRA), "its kind is lora"
    if variant != LoRA(rank=variant.rank, alpha=ALPHA):
        raise ConfigError(
            f"adapter: a Tinker service's LoRA has a rank, alpha {ALPHA:g} and nothing else to set, not {variant!r}; "
            f"set adapter.alpha={ALPHA:g} and leave the rest out."
        )


def build(
    config: RunConfig, task: Task | Environment | None, objective: Objective, say: Callable[[str], None]
) -> Setup:
    """The parts of a run on a service, after ``check``."""
    from earnest.engines.tinker import RemoteEMA, RemoteTeacher, TinkerEngine
    from earnest.engines.tinker.teach import Teaching
    from earnest.engines.tinker.teachers import AnyTeacher
    from earnest.runs.setup import Setup, own_data

    ema: RemoteEMA | None = None
    if config.teacher.kind == "ema":
        try:
            ema = RemoteEMA(rate=config.teacher.mix or 0.05)
        except SignalError as error:
            raise ConfigError(f"teacher.mix: {error}") from None
        say("teacher ema: its past weights exist only in this process, so this run cannot be resumed")
    say(f"a LoRA on {served_name(config.model)} at {config.engine.base_url or 'TINKER_BASE_URL'}")
    variant = config.adapter.build()
    assert isinstance(variant, LoRA), "check() refuses any other"
    engine = TinkerEngine(
        served_name(config.model),
        config.optimizer.build(),
        base_url=config.engine.base_url,
        rank=variant.rank,
        seed=config.seed,
        max_grad_norm=config.optimizer.max_grad_norm,
        estimator=config.engine.estimator,
        outer=ema,
    )
    teacher: AnyTeacher = ema or RemoteTeacher("base" if config.teacher.kind == "base" else "live")
    data = own_data(config.data, engine.policy, objective, task, say)
    return Setup(config, config.model, task, engine, objective, Teaching.of(engine, teacher, objective), data)
