"""Messages to tokens and tokens to text, one thread at a time: a fast tokenizer is not to be shared while it works."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from earnest.errors import EarnestError
from earnest.serve.errors import BadRequest

if TYPE_CHECKING:
    from earnest.models import Policy


class Text:
    """A policy's tokenizer behind a lock."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> tuple[int, ...]:
        """Messages through the chat template, up to where an answer begins (or, without ``answer``, to their end);
        what the template refuses is the request's mistake."""
        from jinja2 import TemplateError

        try:
            with self._lock:
                return tuple(self.policy.render(messages, add_generation_prompt=answer))
        except (TemplateError, EarnestError) as error:
            raise BadRequest(
                f"the chat template of {self.policy.name} refuses these messages: {error}", "messages"
            ) from None

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """A text; without ``special`` as a piece of one, with nothing put around it."""
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


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min((i for s in stop if (i := text.find(s)) >= 0), default=len(text))]


class Unfolding:
    """The text of a growing sequence of tokens, in pieces that never have to be taken back.

    Held back: half of a character, and an end that may become a stop string.
    """

    def __init__(self, text: Text, stop: Sequence[str]) -> None:
        self._text, self._stop = text, tuple(stop)
        self._tokens: list[int] = []
        self._given = ""

    def feed(self, token: int, last: bool = False) -> str:
        """What is certain now beyond what was given before."""
        self._tokens.append(token)
        return self.rest(last)

    def rest(self, last: bool = True) -> str:
        if not self._tokens:
            return ""
        whole = self._text.decode(self._tokens)
        ready = cut(whole, self._stop)
        if ready == whole and not last:
            ready = ready.rstrip("\ufffd")
            ready = ready[: len(ready) - self._pending(ready)]
        piece = ready[len(self._given) :]
        self._given += piece
        return piece

    def _pending(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0
