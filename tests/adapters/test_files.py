"""earnest's own files: exact, strictly loaded, and bound to their base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from earnest.adapters import AdapterError, attach, load_adapter
from earnest.adapters.conformance import SUBJECTS, perturb, tiny_gpt2, tiny_llama
from earnest.adapters.variant import get_variant

IDS = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(0))


F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = [(F32, B16), (B16, F32), (F32, F16), (F16, F32)]
PAIRS += [pytest.param(a, b, marks=pytest.mark.slow) for a, b in ((B16, F16), (F16, B16))]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def saved(tmp_path: Path, label: str = "lora", dtype: torch.dtype = torch.float32) -> nn.Module:
    name, settings = SUBJECTS[label]
    variant = get_variant(name, **settings)
    model = tiny_llama().to(dtype).eval()
    adapter = attach(model, variant, calibration=[IDS] if variant.wants_calibration() else None)
    perturb(adapter)
    adapter.save(tmp_path)
    return model


@pytest.mark.parametrize("label", SUBJECTS)
@pytest.mark.parametrize(("saved_dtype", "loaded"), PAIRS, ids=lambda d: str(d).removeprefix("torch."))
def test_attach_in_one_dtype_load_in_another(
    label: str, saved_dtype: torch.dtype, loaded: torch.dtype, tmp_path: Path
) -> None:
    mine = saved(tmp_path, label, saved_dtype)
    base = tiny_llama().to(saved_dtype).to(loaded).eval()
    noise = float((logits(base) - logits(tiny_llama().to(saved_dtype).eval())).abs().max())
    moved = float((logits(mine) - logits(tiny_llama().to(saved_dtype).eval())).abs().max())
    adapter = load_adapter(base, tmp_path)
    assert all(p.dtype == torch.float32 for p in adapter.parameters())
    assert adapter.report.calibration_tokens == 0, "what is loaded was not calibrated here"
    gap = float((logits(base) - logits(mine)).abs().max())
    assert gap < 8 * noise + 1e-3, (gap, noise)
    assert gap < 0.5 * moved, (gap, moved)


def test_the_scale_is_saved_too(tmp_path: Path) -> None:
    model = tiny_llama().eval()
    adapter = attach(model, get_variant("lora", rank=2))
    perturb(adapter)
    adapter.scale = 0.5
    adapter.save(tmp_path)
    again = tiny_llama().eval()
    assert load_adapter(again, tmp_path).scale == 0.5 and torch.equal(logits(again), logits(model))


def test_another_base_is_refused_in_any_dtype(tmp_path: Path) -> None:
    saved(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        other = tiny_llama()
        with torch.no_grad():
            other.model.layers[1].self_attn.q_proj.weight.mul_(1.2)
        with pytest.raises(AdapterError, match="other base weights"):
            load_adapter(other.to(dtype), tmp_path)
        assert load_adapter(other, tmp_path, check_base=False).report.trainable == 896
    with pytest.raises(AdapterError, match="no linear layer"):
        load_adapter(tiny_gpt2(), tmp_path)


def _tensors(folder: Path, change) -> None:
    """Rewrite the tensors with a correct hash, so that the strict check of the keys must refuse them."""
    import hashlib

    path = folder / "earnest_adapter.safetensors"
    save_file(change(load_file(path)), path)
    meta = json.loads((folder / "earnest_adapter.json").read_text())
    meta["tensors_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "earnest_adapter.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {}, "8 missing"),
        (lambda t: {f"x.{k}": v for k, v in t.items()}, "unexpected"),
        (lambda t: dict(list(t.items())[1:]), "1 missing"),
        (lambda t: t | {"one.more": torch.zeros(1)}, "1 unexpected"),
        (lambda t: {k: v[:1].contiguous() for k, v in t.items()}, "shape"),
        (lambda t: {k: v * float("nan") for k, v in t.items()}, "not finite"),
    ],
)
def test_wrong_tensors_are_refused(change, message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    _tensors(tmp_path, change)
    with pytest.raises(AdapterError, match=message):
        load_adapter(tiny_llama(), tmp_path)


def test_torn_stale_and_missing_files_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "earnest_adapter.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(AdapterError, match="damaged"):
        load_adapter(tiny_llama(), tmp_path)
    path.write_bytes(whole[:-4] + b"\0\0\0\0")
    with pytest.raises(AdapterError, match="is not the file"):
        load_adapter(tiny_llama(), tmp_path)
    path.write_bytes(whole)
    other = tmp_path / "adapter_model.safetensors"
    save_file({k: v * 2 for k, v in load_file(other).items()}, other)
    with pytest.raises(AdapterError, match="two disagree"):
        load_adapter(tiny_llama(), tmp_path)
    path.unlink()
    with pytest.raises(AdapterError, match="missing"):
        load_adapter(tiny_llama(), tmp_path)
    with pytest.raises(AdapterError, match="there is no folder"):
        load_adapter(tiny_llama(), tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterError, match="not an adapter folder"):
        load_adapter(tiny_llama(), tmp_path / "empty")


def test_vera_stores_its_shared_bases_once(tmp_path: Path) -> None:
    saved(tmp_path, "vera")
    names = load_file(tmp_path / "earnest_adapter.safetensors").keys()
    assert {n for n in names if n.startswith("shared.")} == {"shared.A", "shared.B"}
    assert not any(n.endswith(("q_proj.A", "v_proj.B")) for n in names)


def test_the_fingerprint_names_variant_layers_and_base() -> None:
    def mark(rank: int = 2, targets=("q_proj",), scale: float = 1.0) -> str:
        model = tiny_llama()
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(scale)
        return attach(model, get_variant("lora", rank=rank), targets=targets).fingerprint

    assert mark() == mark()
    assert len({mark(), mark(rank=3), mark(targets=("k_proj",)), mark(scale=1.001)}) == 4
