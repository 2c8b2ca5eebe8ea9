"""`earnest doctor`: what this machine has, and what is missing for what."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

from earnest.listings import Listing

# extra of pyproject.toml: (module that it brings, what it is for)
EXTRAS = {
    "data": ("pyarrow", "Parquet and Arrow files, folders of `datasets`, hf:ID"),
    "graders": ("math_verify", "grade: math, grade: json with a schema"),
    "reasoning-gym": ("reasoning_gym", "tasks reasoning_gym/NAME"),
    "verifiers": ("verifiers", "tasks verifiers/NAME"),
    "openenv": ("websockets", "tasks openenv/ADDRESS"),
    "serve": ("fastapi", "earnest serve"),
    "peft": ("peft", "checking adapters against PEFT"),
    "gguf": ("gguf", "the model smollm2"),
    "plots": ("matplotlib", "figures of experiments"),
    "diloco": ("obstore", "replicas in a bucket"),
    "ray": ("ray", "replicas and samplers on Ray"),
    "monarch": ("monarch", "replicas on Monarch"),
    "modal": ("modal", "replicas on Modal"),
    "tinker": ("tinker", "engine.kind: tinker"),
    "torchao": ("torchao", "the optimizer adamw8bit"),
    "tensorboard": ("tensorboard", "loggers: [tensorboard]"),
    "trackio": ("trackio", "loggers: [trackio]"),
    "wandb": ("wandb", "loggers: [wandb]"),
}


def checks() -> list[Listing]:
    """The machine, and the optional parts."""
    machine = Listing("this machine", ("part", "found"))
    machine.add("earnest", metadata.version("earnest"))
    machine.add("python", f"{platform.python_version()} ({sys.executable})")
    machine.add("platform", platform.platform())
    for name in ("torch", "transformers"):
        machine.add(name, metadata.version(name))
    machine.add("devices", _devices())
    machine.add("cores", str(os.cpu_count()))
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    machine.add("free disk here", f"{free:.1f} GB" + ("; a run may not fit" if free < 1 else ""))
    extras = Listing("optional parts", ("extra", "for", "state"))
    for extra, (module, purpose) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        extras.add(extra, purpose, "installed" if there else f"missing: pip install 'earnest[{extra}]'")
    return [machine, extras]


def _devices() -> str:
    import torch

    found = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return ", ".join([*found, f"cpu ({torch.get_num_threads()} threads)"])
