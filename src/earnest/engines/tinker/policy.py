"""What a remote policy is here: a name and a tokenizer. The weights are elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from earnest.errors import EarnestError


class RemotePolicy:
    """The part of ``Policy`` that needs no weights: text to tokens and back."""

    def __init__(self, name: str, tokenizer: Any, positions: int | None) -> None:
        self.name, self.tokenizer, self.positions = name, tokenizer, positions
        self.version, self.device, self.dtype = "remote", torch.device("cpu"), torch.float32

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Messages through the chat template to token ids."""
        if not messages:
            raise EarnestError("There are no messages to render; give at least one.")
        if self.tokenizer.chat_template is None:
            raise EarnestError(f"The tokenizer of {self.name} has no chat template; use encode(text).")
        return list(
            self.tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

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
