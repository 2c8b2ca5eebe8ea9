"""`earnest recipes`, `objectives`, `adapters`, `tasks`, `models`, `runs`, `doctor`: what there is."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from earnest import listings
from earnest.commands.common import Json, show_listings
from earnest.listings import Listing


def recipes(as_json: Json = False) -> None:
    """List the recipes and experiments."""
    show_listings(listings.recipes(), as_json)


Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="Your own file or module that registers terms, adapters or tasks; repeatable."),
]


def _import(entries: list[str] | None) -> None:
    from earnest import plugins

    for entry in entries or ():
        plugins.load(entry)


def objectives(
    kind: Annotated[str | None, typer.Argument(help="Show the fields of this one.")] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """The terms of a loss, each with its paper."""
    _import(imports)
    show_listings(listings.objectives() if kind is None else listings.objective(kind), as_json)


def adapters(
    kind: Annotated[str | None, typer.Argument(help="Show the fields of this one.")] = None,
    imports: Imports = None,
    check: Annotated[bool, typer.Option("--check", help="Run the conformance checks; exit 1 on a failure.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="The checks, also under torch.compile.")] = False,
    as_json: Json = False,
) -> None:
    """The adapters, each with its paper and its learning rate."""
    _import(imports)
    if not (check or compile):
        show_listings(listings.adapters() if kind is None else listings.adapter(kind), as_json)
        return
    table, failures = listings.checked_adapters(compile)
    show_listings(table, as_json)
    print(*(f"✗ {failure}" for failure in failures), sep="\n", end="\n" if failures else "", file=sys.stderr)
    raise typer.Exit(1 if failures else 0)


def tasks(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this one: settings and examples; reasoning_gym lists the datasets of reasoning-gym."),
    ] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """List the tasks (with --json also every dataset of reasoning-gym); with NAME show its description, its settings
    and three prompts with grades."""
    _import(imports)
    several = name is None or name == listings.GYM
    show_listings(listings.tasks(name, datasets=as_json) if several else listings.task(str(name)), as_json)


def models(as_json: Json = False) -> None:
    """List the models that have a name."""
    show_listings(listings.models(), as_json)


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder with the run folders.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs in a folder, newest first: status, steps, held-out numbers."""
    show_listings(listings.runs(folder), as_json)


def doctor(as_json: Json = False) -> None:
    """Show versions, devices, free disk, and which extras are missing for what."""
    show_listings(checks(), as_json)


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
