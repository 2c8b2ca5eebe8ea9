"""PEFT: adapters at initialization, merged, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import AdapterStart, MergedLayer, RoundTrip

Named = Iterator[tuple[str, Callable[[], Any]]]


def peft() -> Named:
    library = import_module("peft")
    llama = import_module("transformers").LlamaForCausalLM
    sizes = import_module("transformers").LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.2,
    )  # fmt: skip
    targets: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    kinds: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: library.LoraConfig(r=4, lora_alpha=8, **targets),
        "LoRA, rank-stabilised": lambda: library.LoraConfig(r=4, lora_alpha=8, use_rslora=True, **targets),
        "LoRA, PiSSA": lambda: library.LoraConfig(r=4, init_lora_weights="pissa", **targets),
        "LoRA, OLoRA": lambda: library.LoraConfig(r=4, init_lora_weights="olora", **targets),
        "DoRA": lambda: library.LoraConfig(r=4, use_dora=True, **targets),
        "AdaLoRA": lambda: library.AdaLoraConfig(target_r=2, init_r=4, total_step=10, tinit=1, tfinal=2, **targets),
        "LoHa": lambda: library.LoHaConfig(r=4, **targets),
        "LoKr": lambda: library.LoKrConfig(r=4, **targets),
        "OFT": lambda: library.OFTConfig(r=0, oft_block_size=8, **targets),
        "BOFT": lambda: library.BOFTConfig(boft_block_size=8, **targets),
        "VeRA": lambda: library.VeraConfig(r=8, **targets),
        "IA3": lambda: library.IA3Config(feedforward_modules=[], **targets),
        "FourierFT": lambda: library.FourierFTConfig(n_frequency=20, **targets),
        "HRA": lambda: library.HRAConfig(r=4, **targets),
        "MiSS": lambda: library.MissConfig(r=4, **targets),
        "RandLoRA": lambda: library.RandLoraConfig(r=4, **targets),
        "SHiRA": lambda: library.ShiraConfig(r=4, **targets),
        "C3A": lambda: library.C3AConfig(block_size=8, **targets),
        "RoAd": lambda: library.RoadConfig(group_size=16, **targets),
        "DeLoRA": lambda: library.DeloraConfig(r=4, **targets),
        "WaveFT": lambda: library.WaveFTConfig(n_frequency=20, **targets),
        "GraLoRA": lambda: library.GraloraConfig(r=4, gralora_k=2, **targets),
        "PVeRA": lambda: library.PveraConfig(r=8, **targets),
        "LNTuning": lambda: library.LNTuningConfig(target_modules=["input_layernorm"]),
    }
    ids = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(0))

    def base() -> nn.Module:
        torch.manual_seed(0)
        return llama(sizes).eval()

    def outputs(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(input_ids=ids).logits

    def perturb(model: nn.Module) -> None:
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.05 * torch.randn(p.shape, generator=rng))

    def adapted(config: Any, moved: bool) -> Any:
        model = library.get_peft_model(base(), config).eval()
        if moved:
            perturb(model)
        return model

    def merged(config: Any) -> MergedLayer:
        model = adapted(config, moved=True)
        return MergedLayer(
            outputs=lambda: outputs(model), merge=model.merge_adapter, unmerge=model.unmerge_adapter, tolerance=1e-3
        )

    def saved(config: Any) -> RoundTrip:
        return RoundTrip(
            make=lambda: adapted(config(), moved=False),
            perturb=perturb,
            save=lambda model, folder: model.save_pretrained(folder),
            load=lambda _, folder: library.PeftModel.from_pretrained(base(), folder, is_trainable=True).eval(),
            outputs=outputs,
            tolerance=1e-5,
        )

    for name, config in kinds.items():
        yield (
            f"{name}: at initialization",
            lambda c=config: AdapterStart(
                base(), lambda model: library.get_peft_model(model, c()).eval(), outputs,
                disable=lambda model: model.disable_adapter(),
            ),
        )  # fmt: skip
        yield f"{name}: merged", lambda c=config: merged(c())
        yield f"{name}: saved and loaded", lambda c=config: saved(c)
