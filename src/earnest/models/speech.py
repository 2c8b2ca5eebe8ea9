"""Text to tokens and back: the part of a policy that needs no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from earnest.errors import EarnestError

Messages = Sequence[Mapping[str, Any]]
"""Messages of a conversation, or the schemas of tools."""


class Speech:
    """The methods of a tokenizer with its chat template; local and remote policies share them."""

    name: str
    tokenizer: Any
    eos_ids: Any

    @cached_property
    def pad_id(self) -> int:
        """The padding id. It may equal an eos (SmolLM2), so loss masks and ends are not read from it."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self.eos_ids, default=0)

    def render(
        self, messages: Messages, *, tools: Messages | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of messages and available tools, by the chat template."""
        return list(self._applied(messages, tools, add_generation_prompt, tokenize=True, return_dict=False))

    def render_text(
        self, messages: Messages, *, tools: Messages | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The text whose tokens ``render`` returns."""
        return str(self._applied(messages, tools, add_generation_prompt, tokenize=False))

    def _applied(self, messages: Messages, tools: Messages | None, add_generation_prompt: bool, **options: Any) -> Any:
        if not messages:
            raise EarnestError(
                "There are no messages to render; give at least one, such as {'role': 'user', 'content': 'hello'}."
            )
        if self.tokenizer.chat_template is None:
            raise EarnestError(
                f"The tokenizer of {self.name} has no chat template. Give one: chat_template: in a recipe, or "
                "policy.tokenizer.chat_template in Python; policy.encode(text) takes plain text without one."
            )
        return self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            tools=[dict(t) for t in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            **options,
        )

    def encode(self, text: str) -> list[int]:
        """Plain text to token ids, with the special tokens that the tokenizer adds."""
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
