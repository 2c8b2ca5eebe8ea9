"""A policy on a service: its name and its tokenizer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from earnest.errors import SignalError
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
