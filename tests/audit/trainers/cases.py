"""Trainers as released, on a tiny random Llama and a tokenizer made here: nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

LINE = "the red fox runs over a green hill and sees one small bird near two old trees by three blue lakes"
WORDS = LINE.split()
TEXTS = [" ".join(WORDS[i : i + 3 + i % 5]) for i in range(12)]


def tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(WORDS)])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side=side
    )


def llama(seed: int, dtype: torch.dtype, width: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=width, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def common(folder: Path, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "seed": seed, "max_steps": 6, "per_device_train_batch_size": 4, "report_to": [],
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "bf16": False, "learning_rate": 1e-3,
        "disable_tqdm": True, "gradient_checkpointing": False, **more,
    }  # fmt: skip


def plain(
    folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], side: str = "right", **more: Any
) -> Trainer:
    words = tokenizer(side)
    rows = Dataset.from_list([dict(words(t + " <eos>", return_token_type_ids=False)) for t in TEXTS])
    return Trainer(
        model=llama(seed, dtype), args=TrainingArguments(**common(folder, seed, **more)), train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(words, mlm=False), callbacks=callbacks,
    )  # fmt: skip


def sft(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": t, "completion": " " + " ".join(WORDS[: 2 + i % 4])} for i, t in enumerate(TEXTS)]
    return SFTTrainer(
        model=llama(seed, dtype), args=SFTConfig(**common(folder, seed, **more)), callbacks=callbacks,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
    )  # fmt: skip


def dpo(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": t, "chosen": " " + " ".join(WORDS[: 2 + i % 3]), "rejected": " " + " ".join(WORDS[5 : 8 + i % 4])}
        for i, t in enumerate(TEXTS)
    ]
    return DPOTrainer(
        model=llama(seed, dtype), ref_model=llama(seed + 1, dtype), args=DPOConfig(**common(folder, seed, **more)),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), callbacks=callbacks,
    )  # fmt: skip


def grpo(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(c) % 7) for c in completions]

    llama(seed, dtype).save_pretrained(folder / "policy")  # the trainer loads its reference from there
    policy = LlamaForCausalLM.from_pretrained(folder / "policy", dtype=dtype)
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 6,
        "beta": 0.05,
        **more,
    }
    return GRPOTrainer(
        model=policy, reward_funcs=reward, args=GRPOConfig(**common(folder, seed, **settings)),
        train_dataset=Dataset.from_list([{"prompt": t} for t in TEXTS]), processing_class=tokenizer(),
        callbacks=callbacks,
    )  # fmt: skip


def gkd(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": " ".join(WORDS[: 2 + i % 4])}]}
        for i, t in enumerate(TEXTS)
    ]
    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m.role[:0] }}{% if m.role == 'user' %}the {{ m.content }} {% else %}a "
        "{{ m.content }} <eos>{% endif %}{% endfor %}"
    )
    return GKDTrainer(
        model=llama(seed, dtype), teacher_model=llama(seed + 1, dtype), callbacks=callbacks, processing_class=words,
        args=GKDConfig(**common(folder, seed, lmbda=0.0, max_length=32, **more)), train_dataset=Dataset.from_list(rows),
    )  # fmt: skip


def sdpo(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 3 == 0) for i, _ in enumerate(completions)]

    llama(seed, dtype).save_pretrained(folder / "policy")
    policy = LlamaForCausalLM.from_pretrained(folder / "policy", dtype=dtype)
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 6,
        "distillation_mode": "full_logits",
        "distillation_alpha": 0.5,
        "teacher_model_kind": "base",
        **more,
    }
    return SDPOTrainer(
        model=policy, reward_funcs=reward, args=SDPOConfig(**common(folder, seed, **settings)),
        train_dataset=Dataset.from_list([{"prompt": t} for t in TEXTS]), processing_class=tokenizer(),
        callbacks=callbacks,
    )  # fmt: skip


PAIRS = [
    {"prompt": t, "chosen": " " + " ".join(WORDS[: 2 + i % 3]), "rejected": " " + " ".join(WORDS[5 : 8 + i % 4])}
    for i, t in enumerate(TEXTS)
]


def reward(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl import RewardConfig, RewardTrainer

    config = llama(seed, dtype).config
    config.num_labels = 1
    torch.manual_seed(seed)
    rows = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in PAIRS]
    return RewardTrainer(
        model=LlamaForSequenceClassification(config).to(dtype), args=RewardConfig(**common(folder, seed, **more)),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), callbacks=callbacks,
    )  # fmt: skip


def kto(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl import KTOConfig, KTOTrainer

    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
        for i, row in enumerate(PAIRS)
    ]
    return KTOTrainer(
        model=llama(seed, dtype), ref_model=llama(seed + 1, dtype), args=KTOConfig(**common(folder, seed, **more)),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), callbacks=callbacks,
    )  # fmt: skip


def orpo(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return ORPOTrainer(
        model=llama(seed, dtype), args=ORPOConfig(**common(folder, seed, **more)), processing_class=tokenizer(),
        train_dataset=Dataset.from_list(PAIRS), callbacks=callbacks,
    )  # fmt: skip


def cpo(folder: Path, seed: int, dtype: torch.dtype, callbacks: list[Any], **more: Any) -> Trainer:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer(
        model=llama(seed, dtype), args=CPOConfig(**common(folder, seed, **more)), processing_class=tokenizer(),
        train_dataset=Dataset.from_list(PAIRS), callbacks=callbacks,
    )  # fmt: skip


TRAINERS = {"Trainer": plain, "SFT": sft, "DPO": dpo, "GRPO": grpo, "GKD": gkd, "SDPO": sdpo}

# Other trainers and documented settings, each with what its loss is: they raise nothing either.
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Reward": (reward, {}),
    "Reward, centred": (reward, {"center_rewards_coefficient": 0.01}),
    "KTO": (kto, {}),
    "ORPO": (orpo, {}),
    "CPO": (cpo, {}),
    "DPO and SFT": (dpo, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "CPO, SimPO": (cpo, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "DPO, robust": (dpo, {"loss_type": ["robust"], "label_smoothing": 0.1}),
    "DPO, exo_pair": (dpo, {"loss_type": ["exo_pair"], "label_smoothing": 0.1}),
    "DPO, weighted": (dpo, {"use_weighting": True}),
    "DPO, shared lengths": (dpo, {"ld_alpha": 0.5}),
    "DPO, JS": (dpo, {"f_divergence_type": "js_divergence"}),
    **{
        f"DPO, {kind}": (dpo, {"loss_type": [kind]})
        for kind in (
            "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
            "discopop", "sigmoid_norm",
        )
    },
    "SFT, DFT": (sft, {"loss_type": "dft"}),
    "SFT, chunked": (sft, {"loss_type": "chunked_nll"}),
    "SFT, packed": (sft, {"packing": True, "max_length": 16}),
    "SFT, smoothed": (sft, {"label_smoothing_factor": 0.1}),
    "GKD, forward": (gkd, {"beta": 0.0}),
    "GKD, reverse": (gkd, {"beta": 1.0}),
}  # fmt: skip
QUICK = ("Reward",)  # the others nightly
