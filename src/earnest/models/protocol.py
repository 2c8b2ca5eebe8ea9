"""The interface of every policy, with its weights in this process or on a remote service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from earnest.models.head import HeadSpec
from earnest.models.speech import Messages


class PolicyLike(Protocol):
    """A name, a tokenizer with its chat template, and the facts that a batch needs. ``head`` is the output layer; a
    policy with remote weights raises when it is read."""

    name: str
    version: str
    device: torch.device
    dtype: torch.dtype

    @property
    def tokenizer(self) -> Any: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def positions(self) -> int | None:
        """The longest sequence in tokens that the model reads; None if it declares no limit."""

    @property
    def head(self) -> HeadSpec: ...

    def render(
        self, messages: Messages, *, tools: Messages | None = None, add_generation_prompt: bool = True
    ) -> list[int]: ...

    def render_text(
        self, messages: Messages, *, tools: Messages | None = None, add_generation_prompt: bool = True
    ) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def fingerprint(self) -> str: ...

    def describe(self) -> str: ...
