"""The models that `en.load` knows by name, for ``earnest models``. It reads headers only and does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from earnest.models import places, smollm2

BUILT_IN = ("nano", "smollm2")


def served_name(model: str) -> str:
    """A Tinker client's name for a model of `earnest serve`: ``earnest/nano`` for an embedded one, otherwise its
    own name."""
    return f"earnest/{model}" if model in BUILT_IN else model


@dataclass(frozen=True)
class ModelInfo:
    """One model. ``offline``: it can be loaded without a network."""

    name: str
    what: str
    parameters: int
    licence: str
    where: str
    offline: bool


def list_models() -> list[ModelInfo]:
    nano = places.nano_folder()
    return [
        ModelInfo(
            "nano",
            "embedded Llama for tests, tutorials and experiments",
            places.count_parameters(nano),
            "Apache-2.0",
            str(nano),
            any(nano.glob("model*.safetensors")),
        ),
        ModelInfo(
            "smollm2",
            f"SmolLM2-135M-Instruct, from the wheel {smollm2.PIN}",
            134_515_008,
            "Apache-2.0",
            str(smollm2.folder()),
            smollm2.is_cached(),
        ),
    ]
