"""Two run folders, bit for bit, wall-clock fields apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k != "seconds"}


def assert_same_run(one: Path, two: Path, steps: int) -> None:
    """Adapter, optimizer, data order, metrics and samples of two finished runs are equal to the last bit."""
    for name in (
        f"checkpoints/step-{steps:06d}/engine/tensors.safetensors",
        f"checkpoints/step-{steps:06d}/engine/meta.json",
    ):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    adapters = sorted(p.name for p in (one / "adapter").iterdir())
    assert adapters and adapters == sorted(p.name for p in (two / "adapter").iterdir())
    for name in adapters:
        assert (one / "adapter" / name).read_bytes() == (two / "adapter" / name).read_bytes(), name
    left, right = (json.loads((f / f"checkpoints/step-{steps:06d}/loop.json").read_text()) for f in (one, two))
    assert left["stream"] == right["stream"]
    first, second = ([without_clock(line) for line in lines(f / "metrics.jsonl")] for f in (one, two))
    assert first == second
    assert [line["step"] for line in first if line["kind"] == "step"] == list(range(1, steps + 1))
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()
