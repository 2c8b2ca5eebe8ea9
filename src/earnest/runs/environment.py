"""The software and hardware of a run: environment.json."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from typing import Any

import torch

from earnest.models.policy import Policy
from earnest.models.protocol import PolicyLike
from earnest.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
OPTIONAL = ("peft", "reasoning-gym", "verifiers")


def describe(policy: PolicyLike) -> dict[str, Any]:
    return {
        "earnest": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": str(policy.device),
        "device_name": torch.cuda.get_device_name(policy.device)
        if policy.device.type == "cuda"
        else platform.processor() or None,
        "dtype": policy.precision if isinstance(policy, Policy) else str(policy.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "model": policy.describe(),
        "base": policy.fingerprint(),
        "packages": {name: version for name in (*PACKAGES, *OPTIONAL) if (version := _version(name)) is not None},
        "git": _git(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """The commit of the working folder, and whether tracked files have changed; None outside a repository."""
    try:
        commit, changed = (
            subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}
