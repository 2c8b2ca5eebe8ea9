"""JSON mode: at each token only continuations are allowed that can still become JSON of the wanted form.

llguidance does the parsing: linear in the text, with its own limits for schemas from clients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import MissingExtra, SamplingError

if TYPE_CHECKING:
    from earnest.models import Policy

STYLE = {"whitespace_flexible": False}  # a model could otherwise write spaces for ever and never close the object


class Grammars:
    """Compiles grammars for one policy's tokenizer; made when the first request needs it."""

    def __init__(self, policy: Policy) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise MissingExtra("llguidance", "serve", "response_format") from None
        self._library = llguidance
        self._tokenizer = llguidance.hf.from_tokenizer(
            policy.tokenizer, n_vocab=policy.head.weight.shape[0], eos_token=sorted(policy.eos_ids)
        )

    def json(self, schema: Mapping[str, Any]) -> str:
        """The grammar of a JSON schema; ``SamplingError`` where it has none."""
        try:
            grammar: str = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=STYLE)
            problem = self._library.LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise SamplingError(f"response_format: this schema cannot be followed: {problem.strip()[:300]}")
        return grammar

    def lark(self, text: str) -> str:
        """A grammar in llguidance's form of Lark; ``SamplingError`` where it has none."""
        grammar: str = self._library.LLMatcher.grammar_from_lark(text)
        if problem := self._library.LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise SamplingError(f"tool_choice: these tools cannot be forced: {problem.strip()[:300]}")
        return grammar

    def matcher(self, grammar: str) -> Matcher:
        return Matcher(self._library.LLMatcher(self._tokenizer, grammar))


class Matcher:
    """The state of one completion in its grammar."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def mask(self, logits: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """-inf at the tokens that the grammar does not allow next."""
        bits = torch.frombuffer(bytearray(self._inner.compute_bitmask()), dtype=torch.uint8)
        self._check()
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: logits.shape[0]].bool()
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Advance the state by the chosen token."""
        self._inner.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            raise SamplingError(f"response_format: {self._inner.get_error().strip()[:300]}")
