"""A saved adapter on its base model."""

from __future__ import annotations

from pathlib import Path

from earnest.adapters.adapter import Adapter
from earnest.adapters.files import adapter_folder, base_model_of, load_adapter
from earnest.errors import EarnestError
from earnest.models import Policy, load
from earnest.models.loading import Dtype

TEMPLATE = "chat_template.jinja"
"""Stored with the adapter's files if the recipe sets a chat template."""


def load_trained(place: Path, model: str | None = None, dtype: Dtype = "auto") -> tuple[Policy, Adapter]:
    """The policy and the adapter of a run folder or an adapter folder; ``model`` replaces the base that it names."""
    base = model or base_model_of(place)
    if base is None:
        raise EarnestError(f"{place} does not name its base model; give --model.")
    policy = load(base, dtype=dtype)
    template = adapter_folder(place) / TEMPLATE
    if template.is_file():
        policy.tokenizer.chat_template = template.read_text(encoding="utf-8")
    return policy, load_adapter(policy, place)
