"""Tiny random policies of several architectures, with a character tokenizer, for tests that need no trained weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from earnest.models import Policy

CHARS = "abcdefghijklmnopqrstuvwxyz0123456789 .,?!\n"
SPECIAL = ["<pad>", "<eos>", "<start>"]
V = len(CHARS) + len(SPECIAL)
CHATML = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)


def tokenizer(*, pad: str | None = "<pad>", template: str | None = CHATML) -> Any:
    vocab = {t: i for i, t in enumerate([*SPECIAL, *CHARS])}
    core = Tokenizer(WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    out = tf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=pad, eos_token="<eos>", additional_special_tokens=["<start>"]
    )
    out.chat_template = template
    return out


_SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": V,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "eos_token_id": 1,
    "bos_token_id": None,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "llama_untied": lambda: tf.LlamaConfig(**_SMALL, tie_word_embeddings=False),
    "qwen2": lambda: tf.Qwen2Config(**_SMALL),
    "qwen3": lambda: tf.Qwen3Config(**_SMALL),
    "mistral_window": lambda: tf.MistralConfig(**_SMALL, sliding_window=4),
    "gpt2": lambda: tf.GPT2Config(**_GPT2),
    "gemma2": lambda: tf.Gemma2Config(
        **_SMALL, sliding_window=4, final_logit_softcapping=0.7, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **{**_SMALL, "num_hidden_layers": 3},
        sliding_window=4,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    ),
    "granite": lambda: tf.GraniteConfig(**_SMALL, logits_scaling=8.0),
    "cohere": lambda: tf.CohereConfig(**_SMALL, logit_scale=0.25),
    "phi_bias": lambda: tf.PhiConfig(**{k: v for k, v in _SMALL.items() if k != "head_dim"}),
    "bloom": lambda: tf.BloomConfig(vocab_size=V, hidden_size=32, n_layer=2, n_head=4, eos_token_id=1, pad_token_id=0),
    "mamba": lambda: tf.MambaConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=1, pad_token_id=0
    ),
    "lfm2": lambda: tf.Lfm2Config(
        **{k: v for k, v in _SMALL.items() if k != "head_dim"}, layer_types=["conv", "full_attention"]
    ),
}


def model(kind: str = "llama", *, seed: int = 0, spread: float = 12.0, **changes: Any) -> Any:
    """Weights larger than usual at initialization: distributions are far from uniform, and attention matters."""
    torch.manual_seed(seed)
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    out = tf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in out.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(spread)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return out


def policy(kind: str = "llama", *, pad: str | None = "<pad>", template: str | None = CHATML, **changes: Any) -> Policy:
    return Policy.of(model(kind, **changes), tokenizer(pad=pad, template=template), name=f"tiny {kind}")


def read(policy: Policy) -> tuple[list[tuple[int, ...]], Callable[[], None]]:
    """The shapes of the token ids that the model reads from now on, and what ends the list."""
    shapes: list[tuple[int, ...]] = []
    embed = policy.model.get_input_embeddings()
    return shapes, embed.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape))).remove
