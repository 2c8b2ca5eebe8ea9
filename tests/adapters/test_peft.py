"""Round trips with the installed PEFT, both ways, logits compared after a perturbation from the symmetric state."""

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
from earnest.adapters.conformance import SUBJECTS, perturb, tiny_gpt2, tiny_llama
from earnest.adapters.variant import get_variant
from tests.adapters.loaders import validate_portable

IDS = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(0))
MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
TOLERANCE = 3e-5  # of logits around 4, through two blocks
EXPORTABLE = [label for label in SUBJECTS if label not in ("antipasto (full δS)", "full")]
PORTABLE = [s for s in EXPORTABLE if s.split()[0] in ("lora", "pissa", "delora", "hra", "eva", "antipasto", "vera")]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def ours(label: str, make) -> tuple[nn.Module, object]:
    name, settings = SUBJECTS[label]
    variant = get_variant(name, **settings)
    model = make().eval()
    adapter = attach(model, variant, calibration=[IDS] if variant.wants_calibration() else None)
    perturb(adapter)
    return model, adapter


def peft_load(make, folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        # PEFT's warnings about Conv1D layouts; those about missing or unknown keys stay errors.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to|.*fan_in_fan_out.*")
        warnings.filterwarnings("error", message=".*[Ff]ound missing adapter keys.*")
        warnings.filterwarnings("error", message="Unexpected keyword arguments.*")
        return peft.PeftModel.from_pretrained(make(), str(folder)).eval()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


# PEFT adapts GPT-2's Conv1D for LoRA, IA3 and VeRA only; HRA and DeLoRA are written there as an exact LoRA.
NO_CONV1D = [s for s in EXPORTABLE if s.startswith(("road", "oft"))]
PAIRS = [(s, "llama") for s in EXPORTABLE] + [(s, "gpt2") for s in EXPORTABLE if s not in NO_CONV1D]


@pytest.mark.parametrize(("label", "model"), PAIRS)
def test_peft_reads_what_we_write(label: str, model: str, tmp_path: Path) -> None:
    mine, adapter = ours(label, MODELS[model])
    adapter.save(tmp_path)
    close(logits(peft_load(MODELS[model], tmp_path)), logits(mine))


@pytest.mark.parametrize("label", NO_CONV1D)
def test_no_file_is_written_that_peft_refuses(label: str, tmp_path: Path) -> None:
    """PEFT has no form of these for Conv1D: only earnest's files are written, with the reason."""
    mine, adapter = ours(label, tiny_gpt2)
    _, earlier = ours("lora", tiny_gpt2)
    earlier.save(tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    adapter.save(tmp_path)
    left = {path.name for path in tmp_path.glob("adapter_*")}
    assert not left, "nor does PEFT find the files of an earlier save"
    assert "for Conv1D layers (GPT-2)" in (tmp_path / "earnest_adapter.json").read_text()
    again = tiny_gpt2().eval()
    load_adapter(again, tmp_path)
    close(logits(again), logits(mine))


PEFT_CONFIGS = {
    "lora": lambda t: peft.LoraConfig(r=4, lora_alpha=10, target_modules=t),
    "lora (rs)": lambda t: peft.LoraConfig(r=4, lora_alpha=10, use_rslora=True, target_modules=t),
    "pissa": lambda t: peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights="pissa", target_modules=t),
    "dora": lambda t: peft.LoraConfig(r=4, use_dora=True, target_modules=t),
    "delora (zero)": lambda t: peft.DeloraConfig(r=4, delora_lambda=9, target_modules=t),
    "ia3": lambda t: peft.IA3Config(target_modules=t, feedforward_modules=[]),
    "ia3_ff": lambda t: peft.IA3Config(target_modules=FFN[t[0]], feedforward_modules=FFN[t[0]]),
    "eva": lambda t: peft.LoraConfig(
        r=4, lora_alpha=4, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0), target_modules=t
    ),
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


TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}
FFN = {"q_proj": ["down_proj"], "c_attn": ["mlp.c_proj"]}
# What PEFT can put on GPT-2's Conv1D, whose weight is transposed and has a bias.
READS = [(kind, "llama") for kind in PEFT_CONFIGS] + [
    (kind, "gpt2") for kind in ("lora", "lora (rs)", "pissa", "dora", "ia3", "ia3_ff", "vera", "eva", "layers")
]


def theirs(kind: str, std: float = 0.1, base: str = "llama") -> nn.Module:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*|.*low_cpu_mem_usage.*")  # Conv1D; EVA's speed
        torch.manual_seed(1)
        model = peft.get_peft_model(MODELS[base](), PEFT_CONFIGS[kind](TARGETS[base]))
        if kind == "eva":
            peft.initialize_lora_eva_weights(model, dataloader=[{"input_ids": IDS}] * 4, show_progress_bar=False)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(std * torch.randn_like(p))
    return model.eval()


@pytest.mark.parametrize(("kind", "base"), READS)
def test_we_read_what_peft_writes(kind: str, base: str, tmp_path: Path) -> None:
    other = theirs(kind, std=0.005 if kind == "oft (series)" else 0.1, base=base)
    other.save_pretrained(str(tmp_path))
    model = MODELS[base]().eval()
    before = logits(model)
    adapter = load_adapter(model, tmp_path)
    close(logits(model), logits(other))
    assert not torch.allclose(logits(model), before, atol=1e-4)
    # and again through earnest's own files
    adapter.save(tmp_path / "again")
    fresh = MODELS[base]().eval()
    load_adapter(fresh, tmp_path / "again")
    assert torch.equal(logits(fresh), logits(model))


def test_an_ia3_that_mixes_inputs_and_outputs_is_refused(tmp_path: Path) -> None:
    """PEFT's own default for Llama: keys and values by their outputs, the second matrix of the FFN by its inputs."""
    config = peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    peft.get_peft_model(tiny_llama(), config).save_pretrained(str(tmp_path))
    with pytest.raises(AdapterError, match="mixes feedforward and other modules; save the two groups as two"):
        load_adapter(tiny_llama(), tmp_path)


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
def test_export_of_a_full_rank_variant_is_refused_with_the_reason(label: str, tmp_path: Path) -> None:
    _, adapter = ours(label, tiny_llama)
    with pytest.raises(AdapterError, match=r"cannot be exported as a LoRA.*merged"):
        adapter.export_lora(tmp_path)


def test_the_full_basis_writes_only_earnests_files_with_the_reason(tmp_path: Path) -> None:
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
        ({"alpha_pattern": {"q_proj": 2}}, "tgi", "alpha_pattern"),
        ({"r": 32}, "vllm", "r=32 exceeds max_lora_rank=16; start vLLM with --max-lora-rank 32"),
        ({"r": 1024}, "vllm", "no vLLM holds it"),
        ({"lora_alpha": None}, "llama.cpp", "lora_alpha is missing"),
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


def _portable(tmp_path: Path, **where) -> Path:
    return attach(tiny_llama(), get_variant("lora", rank=32), **where).export_lora(tmp_path)


def test_the_rank_that_vllm_is_started_with(tmp_path: Path) -> None:
    folder = _portable(tmp_path)
    assert any("max_lora_rank=16" in fault for fault in validate_portable(folder))
    assert validate_portable(folder, max_rank=32) == []
    with pytest.raises(AdapterError, match=r"max_rank=24: .* one of 1, 8, 16, 32"):
        validate_portable(folder, max_rank=24)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj"], "needs q_proj and v_proj, here only q_proj"),
        (["k_proj", "v_proj"], "needs q_proj and v_proj, here only k_proj, v_proj"),
        (["q_proj", "v_proj"], None),
        (["q_proj", "k_proj", "v_proj", "o_proj"], None),
        (["gate_proj"], "needs gate_proj and up_proj, here only gate_proj"),
        (["up_proj", "down_proj"], "here only up_proj"),
        (["gate_proj", "up_proj"], None),
    ],
)
def test_sglang_needs_every_module_that_it_stacks(targets: list[str], message: str | None, tmp_path: Path) -> None:
    faults = validate_portable(_portable(tmp_path, targets=targets), "sglang")
    assert faults == [] if message is None else len(faults) == 2 and all(message in fault for fault in faults)


def test_where_the_modules_are_matters_to_some_servers(tmp_path: Path) -> None:
    head = _portable(tmp_path / "head", targets=["lm_head"])
    assert validate_portable(head, max_rank=32) == ["lm_head: vLLM serves no LoRA on lm_head in general"]
    model = tiny_llama()
    uneven = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"]
    attach(model, get_variant("lora", rank=2), targets=uneven).export_lora(tmp_path / "uneven")
    assert validate_portable(tmp_path / "uneven", "tgi") == ["q_proj: TGI needs every layer of a type, missing [1]"]
    assert len(validate_portable(tmp_path / "uneven", "sglang")) == 1, "block 1 has v_proj alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {}, "no LoRA tensors at all"),
        (lambda t: {k.removeprefix("base_model.model."): v for k, v in t.items()}, "does not start with"),
        (lambda t: dict(list(t.items())[1:]), "has lora_B only"),
    ],
)
def test_the_validator_reads_the_tensors_names(change, message: str, tmp_path: Path) -> None:
    _rewrite(_portable(tmp_path), change)
    assert any(message in fault for fault in validate_portable(tmp_path, "tgi"))


# -- the gate, on disk -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", ["lora", "pissa", "hra", "dora", "ia3", "vera"])
def test_a_scale_is_written_if_the_format_can_hold_it(label: str, tmp_path: Path) -> None:
    """earnest's files always have it; PEFT's only as a plain LoRA with the scale in B."""
    mine, adapter = ours(label, tiny_llama)
    adapter.scale = 0.5
    adapter.save(tmp_path / "own")
    exact = label not in ("dora", "ia3")
    assert (tmp_path / "own" / "adapter_config.json").exists() is exact
    if exact:
        close(logits(peft_load(tiny_llama, tmp_path / "own")), logits(mine))
        adapter.export_lora(tmp_path / "export")
        close(logits(peft_load(tiny_llama, tmp_path / "export")), logits(mine))
    else:
        assert "at scale 0.5" in json.loads((tmp_path / "own" / "earnest_adapter.json").read_text())["peft"]


def test_an_adapter_that_is_off_is_not_exported(tmp_path: Path) -> None:
    _, adapter = ours("lora", tiny_llama)
    with adapter.off():
        with pytest.raises(AdapterError, match=r"is off .scale 0."):
            adapter.export_lora(tmp_path)
        adapter.save(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    model = tiny_llama().eval()
    before = logits(model)
    again = load_adapter(model, tmp_path)
    assert again.scale == 0.0 and torch.equal(logits(model), before)


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
        (lambda t: {k: v.clone().fill_(float("nan")) for k, v in t.items()}, "not finite"),
        (lambda t: t | {"base_model.vera_A": torch.zeros(4)}, "unexpected tensor base_model.vera_A"),
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


def test_a_strange_shared_tensor_is_refused(tmp_path: Path) -> None:
    theirs("vera").save_pretrained(str(tmp_path))
    _rewrite(tmp_path, lambda t: t | {"base_model.vera_C": torch.zeros(4)})
    with pytest.raises(AdapterError, match=r"unexpected tensor base_model\.vera_C"):
        load_adapter(tiny_llama().eval(), tmp_path)


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


# --- modules_to_save ------------------------------------------------------------------------------------------------

SAVED = ["embed_tokens", "lm_head"]


def with_saved(label: str, saved: list[str], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, object]:
    name, settings = SUBJECTS[label]
    variant = get_variant(name, **settings)
    model = tiny_llama().to(dtype).eval()
    calibration = [IDS] if variant.wants_calibration() else None
    adapter = attach(model, variant, calibration=calibration, modules_to_save=saved)
    perturb(adapter)
    return model, adapter


@pytest.mark.parametrize(
    ("label", "saved"),
    [*((s, SAVED) for s in EXPORTABLE), ("lora", ["embed_tokens"]), ("oft", ["model.norm", "lm_head"])],
)
def test_peft_reads_trained_modules(label: str, saved: list[str], tmp_path: Path) -> None:
    """The whole modules to the last bit, and the logits as without them; a tied weight that is named is untied."""
    mine, adapter = with_saved(label, saved)
    adapter.save(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        theirs = peft_load(tiny_llama, tmp_path)
    close(logits(theirs), logits(mine))
    for path, slot in adapter.saved_modules.items():
        wrapped = theirs.base_model.model.get_submodule(path).modules_to_save["default"]
        assert torch.equal(wrapped.weight, slot.layer.module.weight), path
        assert not torch.equal(wrapped.weight, slot.layer.own()["weight"]), path
    again = tiny_llama().eval()
    load_adapter(again, tmp_path)
    assert torch.equal(logits(again), logits(mine))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("own_files", [True, False])
def test_a_lora_alone_with_trained_modules_has_the_bits_of_peft(
    own_files: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A LoRA whose B is 0 leaves the trained modules alone to act: then all logits are equal to the last bit."""
    model = tiny_llama().to(dtype).eval()
    adapter = attach(model, get_variant("lora", rank=2), modules_to_save=SAVED)
    with torch.no_grad():
        for name, p in adapter.named_parameters().items():
            if name.endswith("weight"):
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(4))
    adapter.save(tmp_path)
    if not own_files:
        for name in ("earnest_adapter.json", "earnest_adapter.safetensors"):
            (tmp_path / name).unlink()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        theirs = peft_load(lambda: tiny_llama().to(dtype), tmp_path)
    assert torch.equal(logits(theirs), logits(model))
    again = tiny_llama().to(dtype).eval()
    loaded = load_adapter(again, tmp_path)
    assert set(loaded.saved_modules) == {"model.embed_tokens", "lm_head"}
    assert torch.equal(logits(again), logits(model))
    with loaded.off():
        assert torch.equal(logits(again), logits(tiny_llama().to(dtype).eval()))


def test_we_read_modules_that_peft_trained(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
        theirs = peft.get_peft_model(tiny_llama(), config).eval()
        with torch.no_grad():
            for p in theirs.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        theirs.save_pretrained(tmp_path)
    mine = tiny_llama().eval()
    adapter = load_adapter(mine, tmp_path)
    head = theirs.base_model.model.lm_head.modules_to_save["default"].weight
    assert torch.equal(mine.lm_head.weight, head) and not torch.equal(mine.model.embed_tokens.weight, head)
    close(logits(mine), logits(theirs))
    with torch.no_grad(), adapter.merged():
        close(logits(mine), logits(theirs))


@pytest.mark.parametrize(
    ("saved", "message"),
    [(["lm_hed"], "no module .* is named 'lm_hed'"), (["mlp"], "holds other modules"), (["q_proj"], "has the adapter")],
)
def test_modules_that_cannot_be_saved_are_refused(saved: list[str], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        attach(tiny_llama(), get_variant("lora", rank=2), modules_to_save=saved)


def test_a_portable_lora_does_not_leave_trained_modules_out(tmp_path: Path) -> None:
    _, adapter = with_saved("lora", ["lm_head"])
    with pytest.raises(AdapterError, match="holds no modules_to_save"):
        adapter.export_lora(tmp_path)
