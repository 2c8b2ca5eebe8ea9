"""Documents as (text, supervised) pieces, and the tokenizer that reads them.

``pieces`` is the fast twin of ``chat_template.jinja``: the tests compare their tokens and masks on every kind of
document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
VOCABULARY = 1024

Piece = tuple[str, bool]


def _signatures(tools: Sequence[dict[str, Any]]) -> str:
    return "Tools:" + "".join(
        f" {t['function']['name']}({', '.join(t['function']['parameters']['properties'])})" for t in tools
    )


def pieces(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> list[Piece]:
    """A conversation as text pieces; True marks what the model must produce."""
    out: list[Piece] = []
    if tools and messages[0]["role"] != "system":
        out.append((f"{START}system\n{_signatures(tools)}{END}\n", False))
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role != "assistant":
            extra = f"\n{_signatures(tools)}" if tools and i == 0 and role == "system" else ""
            out.append((f"{START}{role}\n{content}{extra}{END}\n", False))
            continue
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = "".join(
            f'{CALL}{{"name": {json.dumps(f["name"])}, "arguments": {f["arguments"]}}}{CALL_END}' for f in functions
        )
        out += [(f"{START}assistant\n", False), (f"{content}{calls}{END}", True), ("\n", False)]
    return out


def raw(text: str) -> list[Piece]:
    """Plain text without a chat around it."""
    return [(text + END, True)]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE: every byte has a token, so nothing is unknown; every digit and every newline stands alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = [PAD, START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[*special, CALL, CALL_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The marks of a tool call are tokens of their own but ordinary text: decoding must keep them.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in (CALL, CALL_END)])
    return tokenizer
