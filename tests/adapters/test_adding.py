"""docs/adding-an-adapter.md: the page's file is written to the folder of variants, and everything works with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from earnest.adapters import attach, conformance, get_variant, list_variants, load_adapter, variants
from earnest.adapters.variant import VARIANTS

PAGE = Path(__file__).parents[2] / "docs" / "adding-an-adapter.md"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    block = re.search(r"```python\n(\"\"\"LoRA-XS.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "lora_xs.py").write_text(block[1], encoding="utf-8")
    monkeypatch.setattr(variants, "__path__", [*variants.__path__, str(tmp_path)])
    yield
    VARIANTS.pop("lora_xs", None)
    sys.modules.pop("earnest.adapters.variants.lora_xs", None)


def test_one_file_registers_lists_and_checks_it(added: None, tmp_path: Path) -> None:
    variant = get_variant("lora_xs", rank=4)
    assert "lora_xs" in {row["name"] for row in list_variants()}
    assert conformance.subjects()["lora_xs"] == ("lora_xs", {"rank": 4})
    for dtype in (torch.float32, torch.bfloat16):
        case = conformance.Case(variant, conformance.tiny_llama, dtype)
        for check in conformance.CHECKS.values():
            check(case)
    model = conformance.tiny_llama()
    adapter = attach(model, variant)
    conformance.perturb(adapter)
    adapter.export_lora(tmp_path / "portable")
    twin = conformance.tiny_llama()
    load_adapter(twin, tmp_path / "portable")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_a_file_that_does_nothing_is_refused() -> None:
    from earnest.adapters import AdapterError, Variant, register

    with pytest.raises(AdapterError, match="declares no paper"):
        register(type("Nameless", (Variant,), {"name": "nameless"}))
    facts = {"name": "idle", "paper": "0", "reference": "-", "equation": "-"}
    with pytest.raises(AdapterError, match="would do nothing"):
        register(type("Idle", (Variant,), facts))
    with pytest.raises(AdapterError, match=r"must define weight\(\)"):
        register(type("Unmerged", (Variant,), facts | {"after": lambda *a: None}))
    with pytest.raises(AdapterError, match="is taken by LoRA"):
        register(type("Second", (VARIANTS["lora"],), {"name": "lora"}))
