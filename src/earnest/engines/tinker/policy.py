"""A policy on a service (its name and its tokenizer) and its LoRA (its description and its saved path)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earnest.adapters import LoRA
from earnest.errors import ConfigError, SignalError
from earnest.models.head import HeadSpec
from earnest.models.policy import eos_ids
from earnest.models.speech import Speech


class RemotePolicy(Speech):
    """A policy whose weights are on a service."""

    def __init__(self, name: str, tokenizer: Any, positions: int | None) -> None:
        self.name, self.tokenizer, self.positions = name, tokenizer, positions
        self.version, self.device, self.dtype = "remote", torch.device("cpu"), torch.float32

    @cached_property
    def vocabulary(self) -> int:
        return 1 + max(self.tokenizer.get_vocab().values())

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        return eos_ids(self.tokenizer, None)

    @property
    def head(self) -> HeadSpec:
        raise SignalError(
            f"the weights of {self.name} are on a service, which sends log-probs of named tokens and no whole "
            "distribution; take terms and teachers that read log-probs or a top-K, or a LocalEngine."
        )

    def fingerprint(self) -> str:
        """The model's name: the weights cannot be read from here."""
        return f"remote {self.name}"

    def describe(self) -> str:
        return f"{self.name}, on a Tinker service"


@dataclass(frozen=True, eq=False)
class RemoteAdapter:
    """``keep(name)`` saves the weights on the service and returns their tinker:// path."""

    variant: LoRA
    keep: Callable[[], str]
    targets: tuple[str, ...] = ("every linear layer of the service's model",)

    def parameters(self) -> list[Tensor]:
        """Empty: the parameters cannot be counted from here."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        raise ConfigError("a Tinker service does not send its weights; sample from the service itself.")

    def save(self, folder: str | Path, base_model: str | None = None) -> Path:
        """Keep the weights on the service; tinker.json in the folder has their path."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        record = {"path": self.keep(), "base_model": base_model}
        (place / "tinker.json").write_text(json.dumps(record, indent=1) + "\n")
        return place

    def export_lora(self, folder: str | Path, base_model: str | None = None, rank: int | None = None) -> Path:
        raise ConfigError("a Tinker service does not send its weights; export them with the service's own tools.")
