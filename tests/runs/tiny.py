"""A random two-layer Llama on disk, with a tokenizer of single characters and a chat template: it loads at once."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<system>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_folder(place: Path) -> Path:
    """Write the model; the same bits each time."""
    characters = sorted(set(string.ascii_letters + string.digits + " .,!?'\"+-:;()/#="))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, "<unknown>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, "<unknown>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(place)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # a random head at scale 20, so that distributions are far from uniform
        model.lm_head.weight.mul_(20)
    model.save_pretrained(place)
    text = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**text, "earnest_version": "tiny-1"}))
    return place


def recipe(place: Path, model: Path, **changes: object) -> Path:
    """A recipe on the tiny model: `style/volume` rewards exclamation marks, so a random model's rewards differ."""
    data: dict[str, object] = {
        "description": "a test",
        "model": str(model),
        "task": "style/volume",
        "adapter": {"kind": "lora", "rank": 2, "targets": ["q_proj", "v_proj"]},
        "objective": [{"kind": "grpo"}],
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "sampling": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 12},
        "steps": 4,
        "eval": {"every": 2, "prompts": 3, "samples": 2},
        "checkpoint": {"every": 2, "keep": 2},
    } | changes
    place.write_text(json.dumps(data))  # JSON is YAML
    return place
