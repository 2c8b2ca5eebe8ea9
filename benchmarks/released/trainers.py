"""TRL: its trainers, and documented settings of them, on a tiny model; each trains while a callback audits its step."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from earnest_audit import AuditCallback, Finding, Subject

Named = Iterator[tuple[str, Callable[[], Any]]]


@dataclass
class Trained(Subject, name="trainer"):
    """TRAINER: A trainer makes a few updates; the findings are those of the callback."""

    make: Callable[..., Any]
    settings: dict[str, Any]

    def check(self) -> Iterator[Finding]:
        callback = AuditCallback()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.make(Path(folder), 0, torch.float32, [callback], **{"max_steps": 2, **self.settings}).train()
        assert callback.audited is not None
        yield from callback.audited.findings


def trl() -> Named:
    cases = import_module("tests.audit.trainers.cases")
    for name, make in cases.TRAINERS.items():
        yield name, lambda m=make: Trained(m, {})
    for name, (make, settings) in cases.OPTIONS.items():
        yield name, lambda m=make, s=settings: Trained(m, s)
    variants: dict[str, dict[str, Any]] = {
        **{
            f"GRPO, {kind}": {"loss_type": kind}
            for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
        },
        "GRPO, ratios of sequences": {"importance_sampling_level": "sequence"},
        "GRPO, rewards not scaled": {"scale_rewards": "none"},
        "GRPO, two-sided clip": {"delta": 1.5},
        "GRPO, tokens of high entropy": {"top_entropy_quantile": 0.5},
        "GRPO, no reference": {"beta": 0.0},
        "GRPO, entropy bonus": {"entropy_coef": 0.01},
    }
    for name, settings in variants.items():
        yield name, lambda s=settings: Trained(cases.grpo, s)
    yield "RLOO", lambda: Trained(rloo, {})


def rloo(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Any:
    cases, library = import_module("tests.audit.trainers.cases"), import_module("trl")
    settings = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 6, "beta": 0.05}
    cases.llama(seed, dtype).save_pretrained(folder / "policy")
    return library.RLOOTrainer(
        model=cases.LlamaForCausalLM.from_pretrained(folder / "policy", dtype=dtype),
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=library.RLOOConfig(**cases.common(folder, seed, **{**settings, **more})),
        train_dataset=cases.Dataset.from_list([{"prompt": t} for t in cases.TEXTS]),
        processing_class=cases.tokenizer(),
        callbacks=callbacks,
    )
