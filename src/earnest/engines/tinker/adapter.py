"""A LoRA whose weights are on a Tinker service: its description and its saved path."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from earnest.adapters import LoRA
from earnest.errors import ConfigError


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
