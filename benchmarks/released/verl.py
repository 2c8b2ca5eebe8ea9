"""verl: its policy losses in three ways to add up, alone and in micro-batches; advantages; KL penalties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import GAE, Accumulation, AdvantageEstimator, Metric, Setting, Step
from earnest_audit.frontends import prime_rl as prime_step
from earnest_audit.frontends import verl as verl_step

Named = Iterator[tuple[str, Callable[[], Any]]]
COMMON = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "use_dynamic_bsz": False}


def verl() -> Named:
    algos = import_module("verl.trainer.ppo.core_algos")
    actor = import_module("verl.workers.config").ActorConfig
    penalty = import_module("verl.workers.config").PolicyLossConfig(dro_beta=0.1)
    config = actor(**COMMON, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, policy_loss=penalty)
    clip = {"clip_ratio_low": Setting(0.2, "clip"), "clip_ratio_high": Setting(0.28, "clip high")}
    dual = {**clip, "clip_ratio_c": Setting(3.0, "bound")}
    fraction = {"actor/pg_clipfrac": Metric(low=0.0, high=1.0)}
    free: dict[str, Any] = {"value_is_loss": False, "rows_interact": True, "drops_tokens": True}
    declared: dict[str, dict[str, Any]] = {
        "vanilla": {"settings": dual, "metrics": fraction},
        "dppo_tv": {"settings": {}, "metrics": fraction, "value_is_loss": False, "drops_tokens": True},
        "dppo_kl": {"settings": {}, "metrics": fraction, "value_is_loss": False, "drops_tokens": True},
        "gspo": {"settings": clip, "metrics": fraction, "value_is_loss": False},
        "sapo": {"settings": {"tau_pos": Setting(1.0), "tau_neg": Setting(1.05)}},
        "gpg": {"settings": {}, "value_is_loss": False},
        "clip_cov": {"settings": clip, **free},
        "kl_cov": {"settings": {}, **free},
        "geo_mean": {"settings": clip, "metrics": fraction},
        "dro": {"settings": {}},
        "cispo": {"settings": clip, "metrics": fraction, "value_is_loss": False},
    }
    for name, more in declared.items():
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
            loss = algos.POLICY_LOSS_REGISTRY[name]
            if name in ("gspo", "sapo", "cispo"):  # they check the type of their config

                def typed(*args: Any, loss: Any = loss) -> Any:
                    *tensors, config_like = args
                    fields = {**COMMON, "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
                    return loss(*tensors, actor(**{**fields, **config_like.__dict__["_changed"]}))

                yield f"policy loss {name}, {mode}", lambda f=typed, m=mode, d=more: verl_step(f, loss_agg_mode=m, **d)
            else:
                yield (
                    f"policy loss {name}, {mode}",
                    lambda f=loss, m=mode, d=more, n=name: without_behaviour(
                        verl_step(f, config=config, loss_agg_mode=m, **d), n == "gpg"
                    ),
                )
        yield f"micro-batches of {name}", lambda n=name: micro_batches(algos, actor, n)

    def outcome(name: str, **more: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def fn(rewards: Tensor, groups: Tensor) -> Tensor:
            tokens, kept = F.pad(rewards[:, None], (2, 0)), torch.ones(len(rewards), 3)
            found, _ = algos.ADV_ESTIMATOR_REGISTRY[name](
                token_level_rewards=tokens,
                response_mask=kept,
                index=groups.numpy(),
                **more,
            )
            return found[:, 0]

        return fn

    yield "advantages grpo", lambda: AdvantageEstimator(outcome("grpo"), "free")
    yield (
        "advantages grpo without std",
        lambda: AdvantageEstimator(outcome("grpo", norm_adv_by_std_in_grpo=False), "equal"),
    )
    yield "advantages grpo_vectorized", lambda: AdvantageEstimator(outcome("grpo_vectorized"), "free")
    yield "advantages rloo", lambda: AdvantageEstimator(outcome("rloo"), "equal")
    yield "advantages rloo_vectorized", lambda: AdvantageEstimator(outcome("rloo_vectorized"), "equal")
    yield (
        "advantages reinforce_plus_plus_baseline",
        lambda: AdvantageEstimator(outcome("reinforce_plus_plus_baseline"), "free", scaled_over="batch"),
    )
    yield "advantages opo", lambda: AdvantageEstimator(outcome("opo"), "equal")
    for holes in (False, True):
        yield (
            f"GAE, {'holes' if holes else 'no holes'}",
            lambda h=holes: GAE(algos.compute_gae_advantage_return, whitened=True, holes=h),
        )
    for kind in ("k1", "abs", "k2", "k3", "k3+"):
        yield f"kl penalty {kind}", lambda k=kind: penalty_step(algos, k)


def without_behaviour(step: Step, reinforce: bool) -> Step:
    """REINFORCE reads no behaviour log-probs, by design."""
    if reinforce:
        step.roles = {r: k for r, k in step.roles.items() if r != "behaviour"}
    return step


def micro_batches(algos: Any, actor: Any, name: str) -> Accumulation:
    """One mini-batch in pieces, each with the numbers of the whole mini-batch, as verl's ppo_loss hands them over."""
    step = verl_step(lambda *_: None)
    batch = {**step.batch, "advantages": step.batch["advantages"]}

    def accumulate(model: nn.Module, pieces: Sequence[Mapping[str, Any]]) -> None:
        penalty = import_module("verl.workers.config").PolicyLossConfig(dro_beta=0.1)
        config = actor(**COMMON, clip_ratio=0.2, policy_loss=penalty)
        config.global_batch_info["dp_size"] = 1
        config.global_batch_info["batch_num_tokens"] = float(sum(p["mask"].sum() for p in pieces))
        config.global_batch_info["global_batch_size"] = sum(len(p["mask"]) for p in pieces)
        config.global_batch_info["loss_scale_factor"] = None
        for p in pieces:
            assert step.logprobs is not None
            logp = step.logprobs(model, p)
            loss, _ = algos.POLICY_LOSS_REGISTRY[name](
                old_log_prob=p["old"], log_prob=logp, advantages=p["advantages"][:, None] * p["mask"],
                response_mask=p["mask"], loss_agg_mode="seq-mean-token-mean", config=config,
            )  # fmt: skip
            loss.backward()

    coupled = name in ("clip_cov", "kl_cov")  # they choose tokens within a micro-batch
    return Accumulation(step.model, accumulate, batch, rows_interact=coupled)


def penalty_step(algos: Any, kind: str) -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any], coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        made = verl_step(lambda *_: None)
        assert made.logprobs is not None
        logp = made.logprobs(model, batch)
        policy = (-logp * batch["advantages"][:, None] * batch["mask"]).sum() / batch["mask"].sum()
        kl = (algos.kl_penalty(logp, batch["ref"], kind) * batch["mask"]).sum() / batch["mask"].sum()
        return policy + coef * kl, {"kl": kl}

    step = prime_step(lambda *_: None, reference=True)
    low = None if kind == "k1" else 0.0
    roles = {r: k for r, k in step.roles.items() if r != "behaviour"}  # the policy term here is REINFORCE
    return Step(
        model=step.model, loss=loss, batch=step.batch, roles=roles, settings={"coef": Setting(0.1, "weight")},
        metrics={"kl": Metric(low=low, weight="coef")}, optimizer=step.optimizer, logprobs=step.logprobs,
        value_is_loss=False,
    )  # fmt: skip
