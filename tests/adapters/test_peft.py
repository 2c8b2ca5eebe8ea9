"""Round trips with the installed PEFT, both ways, logits compared after a kick from the symmetric state."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from earnest.adapters import AdapterError, attach, load_adapter
from earnest.adapters.conformance import SUBJECTS, kick, tiny_gpt2, tiny_llama
from earnest.adapters.portable import validate_portable
from earnest.adapters.variant import get_variant

IDS = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(0))
MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
TOLERANCE = 3e-5  # of logits around 4, through two blocks
EXPORTABLE = [label for label in SUBJECTS if label != "antipasto (full δS)"]
PORTABLE = [s for s in EXPORTABLE if s.split()[0] in ("lora", "pissa", "delora", "hra", "eva", "antipasto", "vera")]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def ours(label: str, make) -> tuple[nn.Module, object]:
    name, settings = SUBJECTS[label]
    variant = get_variant(name, **settings)
    model = make().eval()
    adapter = attach(model, variant, calibration=[IDS] if variant.wants_calibration() else None)
    kick(adapter)
    return model, adapter


def peft_load(make, folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        # What PEFT says about Conv1D layouts; missing or unknown keys must stay loud.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to|.*fan_in_fan_out.*")
        warnings.filterwarnings("error", message=".*[Ff]ound missing adapter keys.*")
        warnings.filterwarnings("error", message="Unexpected keyword arguments.*")
        return peft.PeftModel.from_pretrained(make(), str(folder)).eval()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


# PEFT adapts GPT-2's Conv1D for LoRA, IA3 and VeRA only.
PAIRS = [(s, "llama") for s in EXPORTABLE] + [
    (s, "gpt2")
    for s in EXPORTABLE
    if s.split()[0] in ("lora", "pissa", "eva", "antipasto", "ia3", "ia3_ff", "vera", "dora")
]


@pytest.mark.parametrize(("label", "model"), PAIRS)
def test_peft_reads_what_we_write(label: str, model: str, tmp_path: Path) -> None:
    mine, adapter = ours(label, MODELS[model])
    adapter.save(tmp_path)
    close(logits(peft_load(MODELS[model], tmp_path)), logits(mine))


PEFT_CONFIGS = {
    "lora": lambda t: peft.LoraConfig(r=4, lora_alpha=10, target_modules=t),
    "lora (rs)": lambda t: peft.LoraConfig(r=4, lora_alpha=10, use_rslora=True, target_modules=t),
    "pissa": lambda t: peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights="pissa", target_modules=t),
    "dora": lambda t: peft.LoraConfig(r=4, use_dora=True, target_modules=t),
    "delora (zero)": lambda t: peft.DeloraConfig(r=4, delora_lambda=9, target_modules=t),
    "ia3": lambda t: peft.IA3Config(target_modules=t, feedforward_modules=[]),
    "ia3_ff": lambda t: peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]),
    "hra": lambda t: peft.HRAConfig(r=4, target_modules=t),
    "road": lambda t: peft.RoadConfig(variant="road_1", group_size=8, target_modules=t),
    "road_2": lambda t: peft.RoadConfig(variant="road_2", group_size=8, target_modules=t),
    "road_4": lambda t: peft.RoadConfig(variant="road_4", group_size=8, target_modules=t),
    "oft": lambda t: peft.OFTConfig(oft_block_size=8, use_cayley_neumann=False, target_modules=t),
    "oft (series)": lambda t: peft.OFTConfig(oft_block_size=8, target_modules=t),
    "vera": lambda t: peft.VeraConfig(r=16, target_modules=t),
    "layers": lambda t: peft.LoraConfig(r=2, target_modules=t, layers_to_transform=[1]),
    "regex": lambda t: peft.LoraConfig(r=2, target_modules=r".*\.[kv]_proj"),
    "all-linear": lambda t: peft.LoraConfig(r=2, target_modules="all-linear"),
}


def theirs(kind: str, std: float = 0.1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = peft.get_peft_model(tiny_llama(), PEFT_CONFIGS[kind](["q_proj", "v_proj"]))
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(std * torch.randn_like(p))
    return model.eval()


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_we_read_what_peft_writes(kind: str, tmp_path: Path) -> None:
    other = theirs(kind, std=0.005 if kind == "oft (series)" else 0.1)
    other.save_pretrained(str(tmp_path))
    model = tiny_llama().eval()
    before = logits(model)
    adapter = load_adapter(model, tmp_path)
    close(logits(model), logits(other))
    assert not torch.allclose(logits(model), before, atol=1e-4)
    # and once more through our own files
    adapter.save(tmp_path / "again")
    fresh = tiny_llama().eval()
    load_adapter(fresh, tmp_path / "again")
    assert torch.equal(logits(fresh), logits(model))


def test_an_unconverged_oft_series_is_refused(tmp_path: Path) -> None:
    theirs("oft (series)", std=0.3).save_pretrained(str(tmp_path))
    with pytest.raises(AdapterError, match="5-term series"):
        load_adapter(tiny_llama(), tmp_path)


@pytest.mark.parametrize("label", PORTABLE)
def test_portable_export_is_exact_and_valid_for_servers(label: str, tmp_path: Path) -> None:
    mine, adapter = ours(label, tiny_llama)
    adapter.export_lora(tmp_path)
    close(logits(peft_load(tiny_llama, tmp_path)), logits(mine))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    doubled = label.split()[0] in ("pissa", "hra") or label == "delora"
    rank = SUBJECTS[label][1]["rank"] * (2 if doubled else 1)
    assert config["r"] == config["lora_alpha"] == max(8, rank)
    for server in ("vllm", "sglang", "tgi", "llama.cpp"):
        assert validate_portable(tmp_path, server) == []
    assert load_adapter(tiny_llama(), tmp_path).variant.name == "lora"


@pytest.mark.parametrize("label", ["dora", "ia3", "ia3_ff", "road", "oft", "antipasto (full δS)"])
def test_what_is_not_low_rank_says_so(label: str, tmp_path: Path) -> None:
    _, adapter = ours(label, tiny_llama)
    with pytest.raises(AdapterError, match=r"cannot be exported as a LoRA.*merged"):
        adapter.export_lora(tmp_path)


def test_the_full_basis_saves_ours_only_and_says_why(tmp_path: Path) -> None:
    mine, adapter = ours("antipasto (full δS)", tiny_llama)
    adapter.save(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    assert "merge it instead" in json.loads((tmp_path / "earnest_adapter.json").read_text())["peft"]
    fresh = tiny_llama().eval()
    load_adapter(fresh, tmp_path)
    assert torch.equal(logits(fresh), logits(mine))


def test_a_rank_too_small_for_the_export_is_refused(tmp_path: Path) -> None:
    _, adapter = ours("pissa", tiny_llama)
    with pytest.raises(AdapterError, match="exactly a LoRA of rank 8"):
        adapter.export_lora(tmp_path, rank=4)


def _edit(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "server", "message"),
    [
        ({"use_dora": True}, "vllm", "use_dora"),
        ({"bias": "all"}, "vllm", "bias"),
        ({"modules_to_save": ["lm_head"]}, "vllm", "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "vllm", "another base"),
        ({"rank_pattern": {"q_proj": 2}}, "vllm", "rank_pattern"),
        ({"r": 1024}, "vllm", "max_lora_rank"),
        ({"r": 16}, "tgi", "is not r = 16"),
        ({"use_rslora": True}, "llama.cpp", "alpha/r"),
        ({"peft_type": "IA3"}, "sglang", "not LORA"),
        ({"target_modules": "re.*"}, "vllm", "list of names"),
    ],
)
def test_the_validator_knows_the_loaders_rules(changes, server: str, message: str, tmp_path: Path) -> None:
    _, adapter = ours("lora", tiny_llama)
    adapter.export_lora(tmp_path)
    _edit(tmp_path, **changes)
    assert any(message in fault for fault in validate_portable(tmp_path, server))


def test_the_validator_sees_tensors_that_servers_refuse(tmp_path: Path) -> None:
    _, adapter = ours("dora", tiny_llama)
    adapter.save(tmp_path)
    assert any("lora_magnitude_vector" in f for f in validate_portable(tmp_path))
    with pytest.raises(AdapterError, match="unknown server"):
        validate_portable(tmp_path, "other")


# -- strict reading ----------------------------------------------------------------------------------------------------
def _peft_folder(tmp_path: Path) -> Path:
    theirs("lora").save_pretrained(str(tmp_path))
    return tmp_path


def _rewrite(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {}, "no tensors for"),
        (lambda t: {f"other.{k}": v for k, v in t.items()}, "unexpected tensor"),
        (lambda t: dict(list(t.items())[1:]), "is missing"),
        (lambda t: dict(list(t.items())[2:]), "no tensors for"),
        (lambda t: t | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, "does not name"),
        (lambda t: t | {"base_model.model.model.norm.weight": torch.zeros(4)}, "unexpected tensor"),
        (lambda t: {k: v[:, :-1].contiguous() for k, v in t.items()}, "shape"),
    ],
)
def test_a_damaged_peft_file_is_refused_and_leaves_the_model_alone(change, message: str, tmp_path: Path) -> None:
    folder = _peft_folder(tmp_path)
    _rewrite(folder, change)
    model = tiny_llama().eval()
    before, flags = logits(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(AdapterError, match=message):
        load_adapter(model, folder)
    assert torch.equal(logits(model), before) and flags == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "does not record"),
        ({"init_lora_weights": "olora"}, "does not record"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "BOFT"}, "'BOFT' is not supported"),
        ({"target_modules": ["nothing"]}, "matches no linear layer"),
    ],
)
def test_settings_that_would_change_the_result_unread_are_refused(changes, message: str, tmp_path: Path) -> None:
    folder = _peft_folder(tmp_path)
    _edit(folder, **changes)
    with pytest.raises(AdapterError, match=message):
        load_adapter(tiny_llama(), folder)
