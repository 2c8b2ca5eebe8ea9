"""`earnest plan`: whether a run fits, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from earnest.commands.common import Json, Overrides, show
from earnest.errors import ConfigError

if TYPE_CHECKING:
    from earnest.plan import Device, MemoryPlan


def plan(
    recipe: Annotated[
        str,
        typer.Argument(help="A name from `earnest recipes`, a YAML file, a run folder, or a model's folder."),
    ],
    overrides: Overrides = None,
    gpu: Annotated[str | None, typer.Option(metavar="80GB", help="Memory of a GPU; none: this machine.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many of them.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row, with its completion; none: measured with the tokenizer.")
    ] = None,
    tflops: Annotated[
        float, typer.Option(min=0.001, help="Assumed speed of a device, in 10^12 operations per second.")
    ] = 300.0,
    link: Annotated[str, typer.Option(metavar="50GB", help="Assumed bytes per second between devices.")] = "50GB",
    as_json: Json = False,
) -> None:
    """Predict memory per device, work and communication of a run; exit 1 if it does not fit."""
    from earnest.config import recipes

    place = Path(recipe).expanduser()
    if place.is_dir() and not (place / "run.json").is_file():
        if not (place / "config.json").is_file():
            raise ConfigError(
                f"{recipe} has no config.json, so it is not a model folder; give a folder with the config.json of a "
                "model, or a recipe (see `earnest recipes`)."
            )
        _, data = recipes.read("quickstart", overrides or [])
        data |= {"model": str(place.resolve())}
    else:
        _, data = recipes.read(str(place / "config.yaml") if place.is_dir() else recipe, overrides or [])
    if "experiment" in data:
        raise ConfigError(f"{recipe} is an experiment of several runs; plan one of its runs with a recipe of its own.")
    from earnest.config import from_mapping
    from earnest.plan import plan as predict
    from earnest.plan.memory import parse_bytes
    from earnest.runs.progress import note_on

    speed = parse_bytes(link)
    if speed is None:
        raise ConfigError(f"--link is {link!r}; give bytes per second, such as 50GB.")
    device = _device(gpu, count)
    found = predict(
        from_mapping(data, overrides or []),
        device,
        tokens=tokens,
        tflops=tflops,
        link=float(speed),
        say=note_on(Console(stderr=True)),
    )
    if as_json:
        print(json.dumps(found.record(), indent=1, default=str))
    else:
        _show(found)
    raise typer.Exit(0 if found.fits else 1)


def _device(gpu: str | None, count: int) -> Device:
    """The device that ``--gpu`` describes, or this machine's: its first GPU, or its memory."""
    from earnest.plan import Device
    from earnest.plan.memory import parse_bytes

    if gpu is not None:
        size = parse_bytes(gpu)
        if size is None:
            raise ConfigError(f"--gpu is {gpu!r}; give the memory of one GPU, such as 80GB or 24GiB.")
        return Device("gpu", size, count)
    import os

    import torch

    if torch.cuda.is_available():
        return Device("gpu", torch.cuda.get_device_properties(0).total_memory, count)
    if not hasattr(os, "sysconf"):
        raise ConfigError("--gpu is required here: the memory of this machine is not known; give 16GB.")
    return Device("cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), count)


def _show(found: MemoryPlan) -> None:
    from earnest.listings import Listing
    from earnest.plan.memory import gigabytes, table

    work, device, paper = found.work, found.device, found.paper
    print(
        f"{found.model}: {found.parameters / 1e6:,.0f} M parameters in {found.dtype}, {found.trained / 1e6:,.2f} M "
        f"trained, on {device.count} × {gigabytes(device.bytes)} ({device.kind})"
    )
    print(
        f"a step has {work.groups} × {work.group} rows of {work.prompt} + {work.completion} tokens "
        f"({work.lengths_from}); the largest micro-batch has {sum(p.tokens for p in found.memory.passes):,} tokens, "
        f"{'packed' if found.memory.packed else 'padded'}"
    )
    listing = Listing("memory per device", ("part", *found.memory.moments))
    for row in table(found.memory):
        listing.add(*row)
    show(listing)
    if (idle := device.count - found.ranks) > 0:
        print(f"{idle} of {device.count} devices stay idle: set engine.shard or engine.replicate, or give --count 1")
    verdict = "fits" if found.fits else "does not fit"
    print(f"{verdict}: the peak is {gigabytes(found.memory.peak)} of {gigabytes(device.room)} (8 % stay free)")
    if found.largest_rows:
        rows, size = found.largest_rows, work.row_tokens
        print(f"the largest micro-batch that fits: {rows:,} rows of {size:,} tokens (micro_tokens={rows * size})")
    else:
        print(f"not even a micro-batch of one row of {work.row_tokens:,} tokens fits")
    if found.changes:
        changes = Listing("what to change, cheapest first; each line includes those above", ("set", "cost", "peak", ""))
        for c in found.changes:
            changes.add(" ".join(c.settings), c.cost, gigabytes(c.peak), "fits" if c.fits else "")
        show(changes)
        if not found.changes[-1].fits:
            print("with all of them it still does not fit: take more or larger devices, or a smaller model")
    if found.memory.peaks.get("sample", 0) > device.room:
        print("sampling does not fit: lower sampling.prompts_per_step, or let a server sample (sampler=URL)")
    print(
        f"on paper, per step and device: {paper.operations / 1e12:,.2f} TFLOP and {gigabytes(paper.sent)} sent; at the "
        f"assumed speeds {paper.computing:,.2f} s of computing, {paper.sampling:,.2f} s of sampling, "
        f"{paper.sending:,.2f} s of sending"
    )
