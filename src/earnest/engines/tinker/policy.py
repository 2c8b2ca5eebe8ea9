"""What a remote policy is here: a name and a tokenizer. The weights are elsewhere."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from earnest.models.speech import Speech


class RemotePolicy(Speech):
    """What can be known of a policy whose weights are elsewhere."""

    def __init__(self, name: str, tokenizer: Any, positions: int | None) -> None:
        self.name, self.tokenizer, self.positions = name, tokenizer, positions
        self.version, self.device, self.dtype = "remote", torch.device("cpu"), torch.float32

    @cached_property
    def vocabulary(self) -> int:
        return 1 + max(self.tokenizer.get_vocab().values())

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        own = self.tokenizer.eos_token_id
        return frozenset() if own is None else frozenset({int(own)})

    @cached_property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self.eos_ids, default=0)

    def fingerprint(self) -> str:
        """The weights cannot be read from here; their name has to do."""
        return f"remote {self.name}"

    def describe(self) -> str:
        return f"{self.name}, on a Tinker service"
