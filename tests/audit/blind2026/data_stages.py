"""Data stages: collators, samplers that are resumed, columns that a stage loses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Collator, Resume, Setting, Step
from tests.audit.blind2026.base import Net, Thing, case, rows


@case("NVIDIA-NeMo/Automodel#3934", "data stages", "collating reshapes the caller's own tensors")
def collator_reshapes_its_inputs(broken: bool) -> Thing:
    def collate(examples: list[Any]) -> dict[str, Tensor]:
        def batched(t: Tensor) -> Tensor:
            if t.ndim == 1:
                return t.unsqueeze_(0) if broken else t.unsqueeze(0)
            return t

        return {key: torch.cat([batched(e[key]) for e in examples]) for key in examples[0]}

    examples = [{"ids": torch.arange(4) + 7 * k, "labels": torch.arange(4) + 7 * k} for k in range(4)]
    return Collator(collate, examples)


class Run:
    """A small regression over shuffled epochs: weights, moments, an average, and a sampler."""

    SIZE = 6

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.updates = 0
        self.seen = 0  # examples of the whole run
        self.offset = 0  # where epochs begin (a fault)
        self.seed_epoch: int | None = None  # the epoch that the sampler shuffles by, where it is not the run's own

    def order(self) -> list[int]:
        epoch = self.seen // self.SIZE if self.seed_epoch is None else self.seed_epoch
        return torch.randperm(self.SIZE, generator=torch.Generator().manual_seed(31 + epoch)).tolist()

    def step(self) -> int:
        if self.seen % self.SIZE == 0:
            self.seed_epoch = None
            if self.offset:
                self.seen += self.offset
        row = self.order()[self.seen % self.SIZE]
        self.seen += 1
        x = torch.randn(3, generator=torch.Generator().manual_seed(row))
        self.optimizer.zero_grad()
        (self.model(x) - x.sum()).square().sum().backward()
        self.optimizer.step()
        self.updates += 1
        decay = 0.9 * (1 - 2.0**-self.updates)
        for mean, p in zip(self.average, self.model.parameters(), strict=True):
            mean.mul_(decay).add_(p.detach(), alpha=1 - decay)
        return row


def resumed(fault: str, steps: int = 4) -> Thing:
    def save(run: Run, folder: Path) -> None:
        torch.save(
            {
                "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "average": run.average,
                "updates": run.updates, "seen": run.seen,
            },
            folder / "state.pt",
        )  # fmt: skip

    def load(run: Run, folder: Path) -> None:
        state = torch.load(folder / "state.pt")
        run.model.load_state_dict(state["model"])
        if fault != "moments":
            run.optimizer.load_state_dict(state["optimizer"])
        run.average = [t.clone() for t in state["average"]]
        run.updates = 0 if fault == "average's count" else state["updates"]
        run.seen = state["seen"]
        run.seed_epoch = 0 if fault == "epoch" else None
        run.offset = state["seen"] % Run.SIZE if fault == "offset" else 0

    def state(run: Run) -> Tensor:
        return torch.cat([*(p.detach().flatten() for p in run.model.parameters()), *(a.flatten() for a in run.average)])

    return Resume(
        make=Run, run=lambda run, n: [run.step() for _ in range(n)], save=save, load=load, state=state, steps=steps
    )


@case("rllm-org/rllm#900", "data stages", "resuming restores weights only, and Adam's moments begin at zero")
def moments_not_restored(broken: bool) -> Thing:
    return resumed("moments" if broken else "")


@case("modelscope/ms-swift#10050", "data stages", "a sampler that is rebuilt in a later epoch shuffles as in the first")
def resumed_epoch_shuffles_as_the_first(broken: bool) -> Thing:
    return resumed("epoch" if broken else "", steps=8)


@case("NVIDIA-NeMo/Megatron-Bridge#4601", "data stages", "every epoch after a resume skips the offset of the resume")
def offset_applied_to_every_epoch(broken: bool) -> Thing:
    return resumed("offset" if broken else "", steps=8)


@case(
    "lightly-ai/lightly-train#892", "data stages", "the average's count of updates is not saved, its warm-up restarts"
)
def average_warms_up_again(broken: bool) -> Thing:
    return resumed("average's count" if broken else "")


@case("NousResearch/atropos#464", "data stages", "the teacher's log-probs are collected and never used")
def teacher_is_not_read(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any], distil: float) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
        nll = -logits.gather(-1, batch["ids"][:, 1:, None])[..., 0]
        gap = F.kl_div(logits, batch["teacher"], reduction="none", log_target=True).sum(-1)
        per_token = nll if broken else nll + distil * gap
        return (per_token * batch["mask"]).sum() / batch["mask"].sum()

    model = Net()
    batch = rows()
    with torch.no_grad():
        batch["teacher"] = Net(9)(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
    return Step(
        model=model, loss=loss, batch=batch,
        roles={"ids": "ids", "attention": "attention", "mask": "mask", "teacher": "teacher"},
        settings={"distil": Setting(0.5, "weight")}, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        family="sft",
    )  # fmt: skip
