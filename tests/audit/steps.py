"""Correct training steps of the four families, written plainly: what the laws must pass, and what the mutants are
made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Metric, Step

VOCABULARY, WIDTH, ROWS, LENGTH, PROMPT = 23, 16, 5, 12, 4


class Tiny(nn.Module):
    """A one-layer causal LM with an attention mask and position ids that know packing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.head.weight, std=0.5)

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.mix(x).chunk(3, -1)
        width = ids.shape[1]
        allowed = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()[None]
        if attention is not None:
            allowed = allowed & (attention[:, None, :] != 0)
        if documents is not None:
            allowed = allowed & (documents[:, :, None] == documents[:, None, :])
        eye = torch.eye(width, dtype=torch.bool, device=ids.device)[None]
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=(allowed | eye)[:, None])
        return self.head(torch.tanh(x + self.out(y[:, 0])))


def logprobs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """log π(ids[t]) for t = 1 …, aligned with ids[:, 1:]."""
    logits = model(batch["ids"], batch.get("attention"), batch.get("documents"))[:, :-1]
    return logits.log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]


def token_batch(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Ragged rows with right padding; the completion starts at PROMPT; tensors of width LENGTH - 1 are aligned with
    ids[:, 1:]."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=rng)
    lengths = torch.tensor([12, 7, 10, 5, 12])
    attention = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    ids = ids * attention
    mask = attention[:, 1:] * (torch.arange(1, LENGTH)[None] >= PROMPT)
    return {"ids": ids, "attention": attention, "mask": mask.to(dtype)}


def policy_batch(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    batch = token_batch(seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        now = logprobs(model, batch)
    noise = 0.05 * torch.randn(now.shape, generator=rng)
    batch["old"] = (now + noise).clamp(max=-1e-3) * batch["mask"]
    batch["ref"] = (now - 0.2 * torch.randn(now.shape, generator=rng).abs()).clamp(max=-1e-3) * batch["mask"]
    batch["advantages"] = torch.tensor([1.0, -0.7, 0.3, -1.2, 0.8])
    return batch


def grpo_loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Token-mean clipped policy gradient with a k3 penalty."""
    lp = logprobs(model, batch)
    mask = batch["mask"]
    ratio = (lp - batch["old"]).exp()
    a = batch["advantages"][:, None]
    surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    gap = batch["ref"] - lp
    kl = gap.exp() - gap - 1
    total = mask.sum()
    loss = ((surrogate + beta * kl) * mask).sum() / total
    metrics = {
        "kl": (kl * mask).sum() / total,
        "approx_kl": ((batch["old"] - lp) * mask).sum() / total,
        "clip_fraction": (((ratio - 1).abs() > clip) * mask).sum() / total,
    }
    return loss, metrics


def sft_loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Masked negative log-likelihood, token-mean."""
    logits = model(batch["ids"], batch["attention"], batch.get("documents"))[:, :-1]
    labels = batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return loss, {"loss": loss}


def distill_loss(model: nn.Module, batch: Mapping[str, Any], alpha: float, temperature: float) -> Tensor:
    """Generalised Jensen–Shannon divergence to a teacher's logits, token-mean."""
    student = (model(batch["ids"], batch["attention"])[:, :-1] / temperature).log_softmax(-1)
    teacher = (batch["teacher"] / temperature).log_softmax(-1)
    mixture = torch.logaddexp(student + torch.tensor(1 - alpha).log(), teacher + torch.tensor(alpha).log())
    to_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    to_student = (student.exp() * (student - mixture)).sum(-1)
    divergence = alpha * to_teacher + (1 - alpha) * to_student
    return (divergence * batch["mask"]).sum() / batch["mask"].sum()


def sequence_logprobs(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    sides = []
    for side in ("chosen", "rejected"):
        row = {"ids": batch[side], "attention": batch[f"{side}_attention"]}
        sides.append((logprobs(model, row) * batch[f"{side}_mask"]).sum(-1))
    return sides[0], sides[1]


def dpo_loss(model: nn.Module, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """−log σ(β[(lp_c − ref_c) − (lp_r − ref_r)])."""
    sides = {}
    for side in ("chosen", "rejected"):
        row = {"ids": batch[side], "attention": batch[f"{side}_attention"]}
        sides[side] = (logprobs(model, row) * batch[f"{side}_mask"]).sum(-1) - batch[f"ref_{side}"]
    margin = sides["chosen"] - sides["rejected"]
    return -F.logsigmoid(beta * margin).mean(), {"margin": margin.mean(), "accuracy": (margin > 0).float().mean()}


def policy_step(loss: Any = grpo_loss, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Step:
    model = Tiny(seed).to(dtype)
    return Step(
        model=model,
        loss=loss,
        batch=policy_batch(model, seed),
        roles={
            "ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "reference": "ref",
            "advantages": "advantages",
        },
        settings={"beta": 0.04, "clip": 0.2},
        metrics={"kl": Metric(0.0, weight="beta"), "clip_fraction": Metric(0.0, 1.0)},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_grad_norm=1.0,
        logprobs=logprobs,
        value_is_loss=True,
        seed=seed,
        **more,
    )  # fmt: skip


def sft_step(
    loss: Any = sft_loss, dtype: torch.dtype = torch.float32, seed: int = 0, packed: bool = False, **more: Any
) -> Step:
    model = Tiny(seed).to(dtype)
    batch = token_batch(seed)
    supervised = torch.cat([torch.zeros(ROWS, 1), batch["mask"]], dim=1) != 0
    batch["labels"] = torch.where(supervised, batch["ids"], -100)
    del batch["mask"]
    roles = {"ids": "ids", "attention": "attention", "labels": "labels"}
    if packed:
        batch["documents"] = (torch.arange(LENGTH)[None] >= 6).long().expand(ROWS, -1).clone()
        batch["labels"][:, 6] = -100  # a document's first token follows from nothing
        roles["documents"] = "documents"
    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles=roles,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        seed=seed,
        **more,
    )


def distill_step(loss: Any = distill_loss, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Step:
    model = Tiny(seed).to(dtype)
    batch = token_batch(seed)
    with torch.no_grad():
        batch["teacher"] = Tiny(seed + 9)(batch["ids"], batch["attention"])[:, :-1]
    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "attention": "attention", "mask": "mask", "teacher": "teacher"},
        settings={"alpha": 0.3, "temperature": 1.5},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        student=lambda m, b: m(b["ids"], b["attention"])[:, :-1],
        seed=seed,
        **more,
    )


def dpo_step(loss: Any = dpo_loss, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Step:
    model, reference = Tiny(seed).to(dtype), Tiny(seed + 5)
    batch: dict[str, Tensor] = {}
    for side, offset in (("chosen", 0), ("rejected", 50)):
        rows = token_batch(seed + offset)
        batch |= {side: rows["ids"], f"{side}_attention": rows["attention"], f"{side}_mask": rows["mask"]}
        with torch.no_grad():
            batch[f"ref_{side}"] = (logprobs(reference, rows) * rows["mask"]).sum(-1)
    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={
            "chosen": "chosen",
            "rejected": "rejected",
            "reference_chosen": "ref_chosen",
            "reference_rejected": "ref_rejected",
            "chosen_mask": "chosen_mask",
            "rejected_mask": "rejected_mask",
        },
        logprobs=sequence_logprobs,
        settings={"beta": 0.1},
        metrics={"accuracy": (0.0, 1.0)},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        seed=seed,
        **more,
    )


def most(step: Step) -> float:
    """What an audit of the step may cost, in step times: 20, and 2 for everything that is declared."""
    settings = sum(1 + len(s.modes) * (s.kind != "inert") for s in step.declared.values())
    functions = [getattr(step, name) for name in ("logprobs", "student", "reference", "backward", "update")]
    others = sum(map(len, (step.roles, step.masks, step.metrics, step.paths)))
    return 20 + 2 * (settings + others + sum(fn is not None for fn in functions)) + 1e-6


STEPS = {"policy gradient": policy_step, "sft": sft_step, "divergence": distill_step, "preference": dpo_step}
