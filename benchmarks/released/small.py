"""tinker-cookbook: its preference loss, schedules and advantages. prime-rl: the losses of its trainer."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import AdvantageEstimator, Metric, Schedule, Setting, Step
from earnest_audit.frontends import prime_rl as prime_step
from tests.audit.steps import dpo_step, sequence_logprobs

Named = Iterator[tuple[str, Callable[[], Any]]]


def tinker_cookbook() -> Named:
    dpo = import_module("tinker_cookbook.preference.train_dpo").compute_dpo_loss
    multiplier = import_module("tinker_cookbook.utils.lr_scheduling").compute_schedule_lr_multiplier
    processing = import_module("tinker_cookbook.rl.data_processing")

    def loss(model: nn.Module, batch: Mapping[str, Any], dpo_beta: float) -> Any:
        chosen, rejected = sequence_logprobs(model, batch)
        return dpo(list(chosen), list(rejected), list(batch["ref_chosen"]), list(batch["ref_rejected"]), dpo_beta)

    def preference() -> Step:
        step = dpo_step()
        return Step(
            model=step.model, loss=loss, batch=step.batch, roles=step.roles, settings={"dpo_beta": Setting(0.1)},
            metrics={"accuracy": (0.0, 1.0)}, optimizer=step.optimizer, logprobs=sequence_logprobs,
        )  # fmt: skip

    yield "compute_dpo_loss", preference
    for name in ("linear", "cosine"):
        yield (
            f"compute_schedule_lr_multiplier {name}",
            lambda n=name: Schedule(
                lambda total, ranks: [1e-4 * multiplier(n, k, total) for k in range(total)], peak=1e-4, final=0.0
            ),
        )

    def advantages(rewards: Tensor, groups: Tensor) -> Tensor:
        names = groups.unique()
        made = [
            types.SimpleNamespace(get_total_rewards=lambda g=g: rewards[groups == g].tolist()) for g in names.tolist()
        ]
        out = torch.empty_like(rewards)
        for name, found in zip(names, processing.compute_advantages(made), strict=True):
            out[groups == name] = found
        return out

    yield "compute_advantages", lambda: AdvantageEstimator(advantages, "equal")


def prime_rl() -> Named:
    """Only the file of the losses is read; its configs are stood in for."""
    source = Path(os.environ["PRIME_RL"]) / "src/prime_rl/trainer/rl/loss.py"
    for name in ("prime_rl", "prime_rl.configs", "prime_rl.configs.trainer", "prime_rl.utils", "prime_rl.utils.utils"):
        sys.modules[name] = types.ModuleType(name)
    for name in ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig"):
        setattr(sys.modules["prime_rl.configs.trainer"], name, type(name, (types.SimpleNamespace,), {}))
    sys.modules["prime_rl.utils.utils"].import_object = None  # type: ignore[attr-defined]
    module = types.ModuleType("prime_rl_loss")
    sys.modules["prime_rl_loss"] = module
    torch.compile = lambda *a, **k: lambda f: f  # the two compiled helpers are not audited
    exec(compile(source.read_text(), str(source), "exec"), module.__dict__)

    def configured(name: str) -> Any:
        return lambda inputs, **given: getattr(module, name)(inputs, types.SimpleNamespace(**given))

    shared = {"adv_tau": Setting(1.0), "kl_tau": Setting(1e-3, "weight")}
    masks = {"dppo_mask_low": Setting(0.2, "bound"), "dppo_mask_high": Setting(0.2, "bound")}
    more: dict[str, Any] = {"inputs": module.LossInputs, "drops_tokens": True}
    share = {"is_masked": Metric(low=0.0, high=1.0, moves=False)}
    for name, settings in (("default_loss_fn", masks), ("ipo_loss_fn", {"ipo_threshold": Setting(0.2, "bound")})):
        yield (
            name,
            lambda n=name, s=settings: prime_step(configured(n), settings={**shared, **s}, metrics=share, **more),
        )
    yield (
        "ref_kl_loss_fn",
        lambda: without_advantages(prime_step(module.ref_kl_loss_fn, reference=True, value_is_loss=False, **more)),
    )


def without_advantages(step: Step) -> Step:
    """The advantages are not read by design."""
    roles = {r: k for r, k in step.roles.items() if r != "advantages"}
    return Step(
        model=step.model, loss=step.loss, batch=step.batch, roles=roles, optimizer=step.optimizer,
        value_is_loss=False, drops_tokens=True,
    )  # fmt: skip
