"""A step of ``transformers.Trainer`` or of a TRL trainer as a ``Step``: the trainer's own ``compute_loss`` on a batch
that it really trains on. Roles, settings and terms are guessed from names; what cannot be known is left undeclared.
"""

from __future__ import annotations

import copy
import numbers
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import edits
from earnest_audit.facts import Kind, Metric, Setting
from earnest_audit.restore import replaced
from earnest_audit.step import Step
from earnest_audit.watching.monitors import hooked

Inputs = Mapping[str, Any]

DOCUMENTS = "documents of the packed rows"  # ours, and never passed to the trainer
# Where a batch has this key, it has this role.
ROLE_OF = {
    "input_ids": "ids",
    "attention_mask": "attention",
    "labels": "labels",
    "position_ids": "positions",
    "completion_mask": "mask",
    "advantages": "advantages",
    "old_per_token_logps": "behaviour",
    "ref_per_token_logps": "reference",
    "importance_sampling_ratio": "importance",
    "chosen": "chosen",
    "rejected": "rejected",
    "chosen_mask": "chosen_mask",
    "rejected_mask": "rejected_mask",
    "label": "correct",
    "ref_chosen_logps": "reference_chosen",
    "ref_rejected_logps": "reference_rejected",
    DOCUMENTS: "documents",
}
KIND_OF: dict[str, Kind] = {"epsilon_low": "clip", "epsilon_high": "clip high"}
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # TRL's loss types with a clip on either side
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
EXPERTS = ("*.experts.*",)  # where the models that route keep them
# One entry per token of the rows.
PER_TOKEN = ("token_type_ids", "completion_ids", "sampling_per_token_logps", "chosen_attention", "rejected_attention",
             *ROLE_OF)  # fmt: skip
# As wide as the completions only by accident: never padded together with them.
APART = ("prompt_ids", "prompt_mask", "KL_input_ids", "KL_attention_mask", "KL_completion_mask", "KL_token_type_ids")


def step_of_trainer(
    trainer: Any, model: nn.Module, inputs: Inputs, compute_loss: Callable[..., Any], *,
    items: Any = None, all_supervised: bool | None = None,
) -> Step:  # fmt: skip
    """``compute_loss`` is the trainer's own; ``items`` is its num_items_in_batch."""
    args, knobs, pairs = trainer.args, _knobs(trainer, inputs), _is_paired(trainer, inputs)
    taught = hasattr(trainer, "teacher_model") and "labels" in inputs
    show, back = (_split_pairs, _join_pairs) if pairs else (_mask_of, _labels_of) if taught else (dict, dict)
    batch = show(inputs) | _documents(inputs)

    def loss(model: nn.Module, changed: Inputs, **settings: Any) -> tuple[Tensor, dict[str, float]]:
        whole = {k: v for k, v in changed.items() if k != DOCUMENTS}
        with replaced(trainer, settings), unchanged(trainer) as metrics:
            value = compute_loss(model, back(whole), num_items_in_batch=items)
        return value, metrics

    roles = {role: key for key, role in ROLE_OF.items() if isinstance(batch.get(key), Tensor)}
    if getattr(args, "distillation_weight", None) == 1:
        roles.pop("advantages", None)  # TRL's SDPO computes them and does not read them where it only distils
    if not _is_a(trainer, "KTOTrainer"):
        roles.pop("correct", None)
    if "labels" in roles:
        roles.pop("mask", None)  # the labels were made from it
    # A weight under a detach: DFT's is the token's own probability, WPO's the pair's.
    weighed = getattr(args, "loss_type", None) == "dft" or getattr(trainer, "use_weighting", False)
    logprobs: Callable[[nn.Module, Inputs], Any] | None = _scores if pairs and _is_a(trainer, "RewardTrainer") else None
    if "advantages" in roles and hasattr(trainer, LOGPROBS):
        logprobs = _logprobs(trainer)
    step = Step(
        model=model,
        loss=loss,
        batch=batch,
        roles=roles,
        settings={n: Setting(v, KIND_OF.get(n, "setting")) for n, v in knobs.items()},
        metrics={"kl": Metric(weight="beta", kind="kl to the reference")}
        if "reference" in roles and "beta" in knobs
        else {},
        optimizer=hooked(trainer.optimizer),
        max_grad_norm=getattr(args, "max_grad_norm", None) or None,
        value_is_loss=False if weighed else None,
        logprobs=logprobs,
        all_supervised=all_supervised,
        rows_interact=_balances(model) or _couples(trainer),
        pairwise=not (_loss_types(trainer) & BY_ITSELF or getattr(args, "center_rewards_coefficient", None)),
        may_idle=EXPERTS if routes(model) else (),
        precision=next((dtype for name, dtype in PRECISIONS.items() if getattr(args, name, False)), None),
        name=f"{type(trainer).__name__}'s step",
        seed=int(getattr(args, "seed", 0)),
    )
    padded = edits.readings(step)[0]
    if padded <= {*PER_TOKEN, *APART}:  # else a tensor that is not known here has the rows' width, and stays a guess
        step.wide = sorted(padded - set(APART))
    return step


# TRL's DPO losses that weigh each answer by itself against the reference, or add a likelihood of the chosen one.
BY_ITSELF = {"nca_pair", "bco_pair", "sppo_hard", "apo_down", "sft"}
SORTED = {"aot", "aot_unpaired"}  # the batch's log-ratios are sorted: rows interact


def _is_a(trainer: Any, *names: str) -> bool:
    return any(c.__name__ in names for c in type(trainer).__mro__)


def _loss_types(trainer: Any) -> set[str]:
    """TRL's DPO may add several losses up."""
    found = getattr(trainer, "loss_types", None) or getattr(trainer, "loss_type", None) or ()
    return {found} if isinstance(found, str) else set(found)


def _couples(trainer: Any) -> bool:
    """Rows that reach into each other: a sort, KTO's KL over the batch, or two terms with a normaliser each (a mean
    over pairs and a mean over tokens), which no weights of the parts can put together."""
    kinds = _loss_types(trainer)
    likelihood = "sft" in kinds and len(kinds) > 1
    likelihood = likelihood or _is_a(trainer, "ORPOTrainer") or bool(getattr(trainer, "cpo_alpha", 0))
    return likelihood or bool(kinds & SORTED) or _is_a(trainer, "KTOTrainer")


def asks_for_a_mask(trainer: Any, inputs: Inputs) -> bool:
    """Whether this trainer is set (or made) to leave prompts unsupervised."""
    if any(getattr(trainer.args, name, None) for name in ("completion_only_loss", "assistant_only_loss")):
        return True
    return "completion_mask" in inputs or "prompt_ids" in inputs


_PAIRED = {"input_ids": "", "attention_mask": "_attention", "completion_mask": "_mask"}


def _is_paired(trainer: Any, inputs: Inputs) -> bool:
    """DPO's batch and a reward model's; KTO's has a label for every row instead of a rival."""
    ids = inputs.get("input_ids")
    by_keys = "completion_mask" in inputs and not {"labels", "label", "prompt_ids"} & inputs.keys()
    return (by_keys or _is_a(trainer, "RewardTrainer")) and isinstance(ids, Tensor) and len(ids) % 2 == 0


def _split_pairs(inputs: Inputs) -> dict[str, Any]:
    """TRL stacks [chosen; rejected]."""
    batch = {k: v for k, v in inputs.items() if k not in _PAIRED}
    for key, suffix in _PAIRED.items():
        if key in inputs:
            batch[f"chosen{suffix}"], batch[f"rejected{suffix}"] = inputs[key].chunk(2)
    return batch


def _join_pairs(batch: Inputs) -> dict[str, Any]:
    own = {f"{side}{suffix}" for side in ("chosen", "rejected") for suffix in _PAIRED.values()}
    inputs = {k: v for k, v in batch.items() if k not in own}
    for key, suffix in _PAIRED.items():
        if f"chosen{suffix}" in batch:
            inputs[key] = torch.cat([batch[f"chosen{suffix}"], batch[f"rejected{suffix}"]])
    return inputs


def _mask_of(inputs: Inputs) -> dict[str, Any]:
    """In distillation labels only mark positions."""
    mask = (inputs["labels"] != -100).to(inputs["attention_mask"].dtype)
    return {**{k: v for k, v in inputs.items() if k != "labels"}, "completion_mask": mask}


def _labels_of(batch: Inputs) -> dict[str, Any]:
    labels = torch.where(batch["completion_mask"] != 0, batch["input_ids"], -100)
    return {**{k: v for k, v in batch.items() if k != "completion_mask"}, "labels": labels}


def _documents(inputs: Inputs) -> dict[str, Tensor]:
    """Which document a token of a packed row belongs to: position ids begin again inside the row, at a real token."""
    positions, shown = inputs.get("position_ids"), inputs.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return {}
    begins = positions[:, 1:] <= positions[:, :-1]
    if isinstance(shown, Tensor) and shown.shape == positions.shape:
        begins = begins & (shown[:, 1:] != 0) & (shown[:, :-1] != 0)
    if not bool(begins.any()):
        return {}
    return {DOCUMENTS: torch.cat([torch.zeros_like(positions[:, :1]), begins.cumsum(-1)], dim=1)}


def _balances(model: nn.Module) -> bool:
    """Whether a router's load-balancing loss is in the step: a product of means over all tokens couples the rows."""
    config = _config(model)
    return bool(getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0))


def routes(model: nn.Module) -> bool:
    """Whether tokens are sent to some of many experts: one batch may send none to one of them."""
    return any(getattr(_config(model), name, 0) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None) or getattr(getattr(model, "module", None), "config", None)


LOGPROBS = "_get_per_token_logps_and_entropies"


def _knobs(trainer: Any, inputs: Inputs) -> dict[str, float]:
    """Settings that this loss reads from the trainer itself, where they are not 0 (a 0 switches its term off)."""
    names: list[str] = []
    if "advantages" in inputs:
        names += ["beta"] if "ref_per_token_logps" in inputs else []
        acts = getattr(trainer, "loss_type", None) in CLIPPED and "old_per_token_logps" in inputs
        names += ["epsilon_low", "epsilon_high"] if acts else []
    elif _is_paired(trainer, inputs) or hasattr(trainer, "teacher_model"):
        names += ["beta"]
    elif isinstance(label := inputs.get("label"), Tensor) and _is_a(trainer, "KTOTrainer"):
        names += ["beta", *(["desirable_weight", "undesirable_weight"] if 0 < int(label.sum()) < len(label) else [])]
    found = {name: getattr(trainer, name, None) for name in names}
    return {name: float(v) for name, v in found.items() if isinstance(v, float) and v}


def _logprobs(trainer: Any) -> Callable[[nn.Module, Inputs], Tensor]:
    def logprobs(model: nn.Module, batch: Inputs) -> Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        shown = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        return getattr(trainer, LOGPROBS)(model, ids, shown, batch["completion_ids"].shape[1])[0]

    return logprobs


def _scores(model: nn.Module, changed: Inputs) -> Any:
    """A reward model's scores of the chosen and the rejected answers."""
    batch = _join_pairs(changed)
    found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    return found.logits.squeeze(-1).chunk(2)


@contextmanager
def unchanged(trainer: Any) -> Iterator[dict[str, float]]:
    """Counters, metrics and logs of the trainer are restored; what it logged meanwhile is returned."""
    kept = {name: copy.deepcopy(value) for name, value in vars(trainer).items() if _plain(value)}
    logged: dict[str, float] = {}
    try:
        yield logged
    finally:
        now = getattr(trainer, "_metrics", {})
        before = kept.get("_metrics", {})
        if isinstance(now, dict) and isinstance(now.get("train"), dict):
            for name, values in now["train"].items():
                new = values[len(before.get("train", {}).get(name, [])) :]
                if new and isinstance(new[-1], numbers.Real):
                    logged[name] = float(new[-1])
        for name in [n for n, v in vars(trainer).items() if n not in kept and _plain(v)]:
            delattr(trainer, name)
        for name, value in kept.items():
            setattr(trainer, name, value)


def _plain(value: Any, depth: int = 0) -> bool:
    """Numbers and text, tensors, and small containers of them: what a loss counts and logs."""
    if value is None or isinstance(value, str | bool | numbers.Number | Tensor):
        return not isinstance(value, nn.Parameter)
    if depth > 3 or not isinstance(value, dict | list | tuple | set | deque):
        return False
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    return len(inner) <= 10_000 and all(_plain(v, depth + 1) for v in inner)
