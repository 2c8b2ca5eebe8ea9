"""torchtune: losses, advantages, collators, the schedule, recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.released import recipes
from earnest_audit import GAE, AdvantageEstimator, Collator, Metric, Schedule, Setting, Step
from tests.audit.steps import Tiny, dpo_step, sequence_logprobs, sft_step, token_batch

Named = Iterator[tuple[str, Callable[[], Any]]]


def torchtune() -> Named:
    rlhf, losses = import_module("torchtune.rlhf"), import_module("torchtune.rlhf.loss")
    modules, data = import_module("torchtune.modules.loss"), import_module("torchtune.data")
    schedule = import_module("torchtune.training.lr_schedulers")

    def pairs(make: Callable[..., Any], **settings: Any) -> Step:
        def loss(model: nn.Module, batch: Mapping[str, Any], **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
            chosen, rejected = sequence_logprobs(model, batch)
            each, good, bad = make(**given)(chosen, rejected, batch["ref_chosen"], batch["ref_rejected"])
            return each.mean(), {"accuracy": (good > bad).float().mean(), "margin": (good - bad).mean()}

        step = dpo_step()
        return Step(
            model=step.model, loss=loss, batch=step.batch, roles=step.roles, settings=settings, metrics=step.metrics,
            optimizer=step.optimizer, logprobs=sequence_logprobs,
        )  # fmt: skip

    yield (
        "DPOLoss",
        lambda: pairs(losses.DPOLoss, beta=Setting(0.1), label_smoothing=Setting(0.1, "smoothing", pure=0.0)),
    )
    yield "RSOLoss", lambda: pairs(losses.RSOLoss, gamma=Setting(0.1, "setting"))
    yield "PPOLoss", lambda: ppo(losses.PPOLoss)

    def chunked(model: nn.Module, batch: Mapping[str, Any], chunks: int) -> Tensor:
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        logits = model(batch["ids"], batch["attention"])
        return modules.CEWithChunkedOutputLoss(chunks)(list(logits.chunk(chunks, 1)), labels)

    yield "CEWithChunkedOutputLoss", lambda: sft_step(chunked, settings={"chunks": Setting(4, "inert")})
    for name in ("ForwardKLLoss", "ReverseKLLoss", "SymmetricKLLoss"):
        yield (
            name,
            lambda n=name: distilled(getattr(modules, n), getattr(modules, n.replace("KL", "KLWithChunkedOutput"))),
        )
    yield (
        "estimate_advantages",
        lambda: GAE(
            lambda r, v, m, gamma, lam: rlhf.estimate_advantages(v * m, r * m, gamma, lam, m.bool()), whitened=True
        ),
    )
    yield (
        "whiten, of rewards that become advantages",
        lambda: AdvantageEstimator(lambda r, _: rlhf.whiten(r), "free", over="batch"),
    )

    def rates(total: int, _ranks: int) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-4)
        plan = schedule.get_cosine_schedule_with_warmup(optimizer, 5, total)
        found = []
        for _ in range(total):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            plan.step()
        return found

    yield "get_cosine_schedule_with_warmup", lambda: Schedule(rates, peak=3e-4, final=0.0, warmup=5)
    rows = [{"tokens": [3 + k] * n, "labels": [-100] + [3 + k] * (n - 1)} for k, n in enumerate((4, 7, 2))]
    yield "padded_collate_sft", lambda: Collator(data.padded_collate_sft, rows, pads={"tokens": 0, "labels": -100})
    both = [
        {"chosen_input_ids": [5 + k] * n, "chosen_labels": [5 + k] * n, "rejected_input_ids": [9 + k] * (n + 1),
         "rejected_labels": [9 + k] * (n + 1)}
        for k, n in enumerate((4, 7, 2))
    ]  # fmt: skip
    yield (
        "padded_collate_dpo",
        lambda: Collator(
            lambda e: dict(zip(("ids", "labels"), data.padded_collate_dpo(e), strict=True)), both, rows=False
        ),
    )
    yield from recipes.torchtune_recipes()


def ppo(loss_type: Any) -> Step:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = Tiny()
            self.value = nn.Linear(23, 1)

        def forward(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.policy(ids, attention)[:, :-1]
            return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0], self.value(logits)[..., 0]

    model, batch = Critic(), token_batch()
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        logp, values = model(batch["ids"], batch["attention"])
    batch["old"] = logp + 0.05 * torch.randn(logp.shape, generator=rng)
    batch["values"] = values + 0.05 * torch.randn(values.shape, generator=rng)
    batch["returns"] = values + torch.randn(values.shape, generator=rng)
    batch["advantages"] = torch.randn(values.shape, generator=rng)

    def loss(model: nn.Module, batch: Mapping[str, Any], **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
        now, value = model(batch["ids"], batch["attention"])
        mask = batch["mask"].bool()
        total, policy, critic, ratio, clipped = loss_type(**given)(
            batch["old"], now, batch["advantages"], batch["values"], value, batch["returns"], mask, mask
        )
        return total, {"value_loss": critic, "clip_fraction": clipped, "ratio": ratio, "policy_loss": policy}

    roles = ("ids", "attention", "mask", "values", "returns", "advantages")
    return Step(
        model=model, loss=loss, batch=batch, roles={**{r: r for r in roles}, "behaviour": "old"},
        settings={
            "epsilon": Setting(0.1, "clip"), "value_clip_range": Setting(0.2), "value_coeff": Setting(0.1, "weight"),
        },
        metrics={"clip_fraction": Metric(low=0.0, high=1.0), "value_loss": Metric(low=0.0, weight="value_coeff")},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        logprobs=lambda m, b: m(b["ids"], b["attention"])[0],
    )  # fmt: skip


def distilled(whole: Any, chunked: Any) -> Step:
    model, batch = Tiny(), token_batch()
    with torch.no_grad():
        batch["teacher"] = Tiny(9)(batch["ids"], batch["attention"])[:, :-1]

    def labels(batch: Mapping[str, Any]) -> Tensor:
        return torch.where(batch["mask"] != 0, batch["ids"][:, 1:], -100)

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        student = model(batch["ids"], batch["attention"])[:, :-1]
        return whole()(student, batch["teacher"], labels(batch))

    def in_chunks(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        student = model(batch["ids"], batch["attention"])[:, :-1]
        n = 3
        return chunked(num_output_chunks=n)(
            list(student.chunk(n, 1)), list(batch["teacher"].chunk(n, 1)), labels(batch)
        )

    return Step(
        model=model, loss=loss, batch=batch,
        roles={"ids": "ids", "attention": "attention", "mask": "mask", "teacher": "teacher"},
        student=lambda m, b: m(b["ids"], b["attention"])[:, :-1], paths={"chunked": in_chunks},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )  # fmt: skip
