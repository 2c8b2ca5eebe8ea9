"""What every policy offers, whether its weights are in this process or on a service elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from earnest.models.head import HeadSpec


class PolicyLike(Protocol):
    """A name, a tokenizer with its chat template, and the few facts that a batch needs.

    ``head`` is the output layer; a policy whose weights are elsewhere raises when it is read.
    """

    name: str
    version: str
    device: torch.device
    dtype: torch.dtype

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def positions(self) -> int | None:
        """The longest sequence in tokens that the model reads; None where it declares no limit."""
        ...

    @property
    def head(self) -> HeadSpec: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def fingerprint(self) -> str: ...

    def describe(self) -> str: ...
