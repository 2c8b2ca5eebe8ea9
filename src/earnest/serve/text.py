"""Messages to tokens and tokens to text, one thread at a time, since a fast tokenizer is not thread-safe."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from earnest.errors import EarnestError
from earnest.serve.errors import BadRequest

if TYPE_CHECKING:
    from earnest.models import Policy


BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Text:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Messages and tools through the chat template, up to where an answer begins (or, without ``answer``, to their
        end); messages that the template refuses are the client's mistake."""
        from jinja2 import TemplateError

        try:
            with self._lock:
                return tuple(self.policy.render(messages, tools=tools or None, add_generation_prompt=answer))
        except (TemplateError, EarnestError) as error:
            raise BadRequest(
                f"the chat template of {self.policy.name} refuses these messages: {error}", "messages"
            ) from None

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The tokens of a text; without ``special``, without the special tokens around a text."""
        with self._lock:
            if not special:
                return tuple(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])
            return tuple(self.policy.encode(text))

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        with self._lock:
            if special:
                return str(
                    self.policy.tokenizer.decode(
                        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
                    )
                )
            return self.policy.decode(tokens)

    def bytes_of(self, token: int) -> list[int] | None:
        """The bytes that a token stands for, also where it is a part of a character. None where the tokenizer does not
        define them."""
        with self._lock:
            name = self.policy.tokenizer.convert_ids_to_tokens(token)
            special = token in self.policy.tokenizer.added_tokens_decoder
        if name is not None and not special:
            if "ByteLevel" in self._decoders and all(c in self._alphabet for c in name):
                return [self._alphabet[c] for c in name]
            if "ByteFallback" in self._decoders and (byte := BYTE.fullmatch(name)):
                return [int(byte[1], 16)]
        said = self.decode([token], special=True)
        return None if "\ufffd" in said else list(said.encode())

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """How a byte-level vocabulary writes bytes."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {character: byte for byte, character in bytes_to_unicode().items()}

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """How a fast tokenizer makes text of its tokens."""
        backend = getattr(self.policy.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return frozenset()
        with self._lock:
            decoder = json.loads(backend.to_str()).get("decoder") or {}
        return frozenset(d["type"] for d in (decoder, *decoder.get("decoders", ())) if "type" in d)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min((i for s in stop if (i := text.find(s)) >= 0), default=len(text))]


class IncrementalText:
    """The text of a growing sequence of tokens, in pieces that later tokens cannot change. An incomplete character, and
    an end that may become a stop string, are withheld. ``special``: with special tokens, except those that end the
    turn."""

    def __init__(self, text: Text, stop: Sequence[str], special: bool = False) -> None:
        self._text, self._stop, self._special = text, tuple(stop), special
        self._tokens: list[int] = []
        self._given = ""

    def feed(self, token: int, last: bool = False) -> str:
        """The text that is new and final."""
        if not (self._special and token in self._text.policy.eos_ids):
            self._tokens.append(token)
        return self.rest(last)

    def rest(self, last: bool = True) -> str:
        if not self._tokens:
            return ""
        whole = self._text.decode(self._tokens, self._special)
        ready = cut(whole, self._stop)
        if ready == whole and not last:
            ready = ready.rstrip("\ufffd")
            longest = min(max(map(len, self._stop), default=1) - 1, len(ready))
            ends = (k for k in range(longest, 0, -1) if any(s.startswith(ready[-k:]) for s in self._stop))
            ready = ready[: len(ready) - next(ends, 0)]  # without the longest end that begins a stop string
        piece = ready[len(self._given) :]
        self._given += piece
        return piece
