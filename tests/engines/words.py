"""A tokenizer of whole words "w0 w1 …": enough for a policy whose tokens mean nothing."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(size)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", pad_token="w0", unk_token="w2")
