"""How often one training step waits for the device.

    python benchmarks/device_syncs.py [--before SRC]

A step is: the signals that the objective reads, then ``engine.step``. The count includes operators whose result Python
reads (``item``, ``bool``, ``tolist``) or whose shape depends on values (``nonzero``, ``unique``, ``bincount``, a mask
as an index): on a GPU each of them waits until everything queued before it is done. The count does not depend on the
device, so it is made on the CPU. ``--before`` is the ``src`` folder of another version of earnest, counted in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).parent / "results"
WAITING = {
    "aten._local_scalar_dense.default": "item, bool",
    "aten.nonzero.default": "nonzero",
    "aten._unique2.default": "unique",
    "aten.unique_dim.default": "unique",
    "aten.bincount.default": "bincount",
    "aten.masked_select.default": "masked_select",
    "aten.equal.default": "equal",
    "aten.repeat_interleave.Tensor": "repeat_interleave",
}


class Waits(TorchDispatchMode):
    """Counts the operators that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.places: Counter[str] = Counter()

    def count(self, what: str) -> None:
        """Count one wait, for the file of the innermost function of earnest on the stack."""
        self.found[what] += 1
        frame = sys._getframe(1)
        while frame is not None and "/earnest/" not in frame.f_code.co_filename:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            self.places[frame.f_code.co_filename.rpartition("/earnest/")[2]] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name in WAITING:
            self.count(WAITING[name])
        elif name.startswith("aten.index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool
            for a in args
            if isinstance(a, list | tuple)
            for i in a
        ):
            self.count("index by a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Waits]:
    """Inside the block every wait is counted; ``tolist`` is not an operator, so it is patched."""
    plain = torch.Tensor.tolist
    with Waits() as waits:

        def tolist(self: torch.Tensor) -> Any:
            waits.count("tolist")
            return plain(self)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        try:
            yield waits
        finally:
            torch.Tensor.tolist = plain  # type: ignore[method-assign]


def steps() -> dict[str, dict[str, Any]]:
    """The waits of a step by objective and cut, on nano and the sort task: all, by operator, by file."""
    import earnest as en
    from earnest.signals import with_reference

    policy = en.load("nano")
    adapter = en.attach(policy, en.LoRA(rank=4), targets=("q_proj", "v_proj"), seed=0)
    task = en.get_task("sort")
    spec = en.SampleSpec(max_new_tokens=8, seed=1)
    objectives = {"GRPO": en.GRPO(), "GRPO + ReferenceKL + KLBarrier": en.GRPO() + en.ReferenceKL() + en.KLBarrier()}
    found = {}
    for name, objective in objectives.items():
        for cut, micro_tokens in (("one piece", 8192), ("micro-batches", 128)):
            engine = en.LocalEngine(policy, adapter, micro_tokens=micro_tokens)
            batch = en.collect(engine, task, task.prompts("train", 4, 0), 4, spec).batch
            engine.step(with_reference(engine, batch, objective), objective)  # caches and the optimizer's state
            with counted() as waits:
                engine.step(with_reference(engine, batch, objective), objective)
            by = {"operators": dict(sorted(waits.found.items())), "files": dict(waits.places.most_common())}
            found[f"{name}, {cut}"] = {"total": sum(waits.found.values()), **by}
    return found


def _signals(row: dict[str, Any]) -> int:
    return sum(count for file, count in row["files"].items() if file.startswith("signals/"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the src folder of another version of earnest")
    parser.add_argument("--json", action="store_true", help="print the counts of this version as JSON and stop")
    args = parser.parse_args()
    now = steps()
    if args.json:
        print(json.dumps(now))
        return
    before: dict[str, dict[str, Any]] = {}
    if args.before is not None:
        command = [sys.executable, __file__, "--json"]
        environment = os.environ | {"PYTHONPATH": str(args.before.resolve())}
        answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        before = json.loads(answer.splitlines()[-1])
    print("| step | before | now | of these in signals/: before | now |\n|---|---|---|---|---|")
    for name, row in now.items():
        old = before.get(name, {"total": "-", "files": {}})
        print(f"| {name} | {old['total']} | {row['total']} | {_signals(old)} | {_signals(row)} |")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "device_syncs.json").write_text(json.dumps({"before": before, "now": now}, indent=2) + "\n")


if __name__ == "__main__":
    main()
