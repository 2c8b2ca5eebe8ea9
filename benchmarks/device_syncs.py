"""How often one training step waits for the device.

    python benchmarks/device_syncs.py [--before SRC]

A step is: the signals that the objective reads, then ``engine.step``. Counted are the operators whose result Python
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name in WAITING:
            self.found[WAITING[name]] += 1
        elif name.startswith("aten.index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool
            for a in args
            if isinstance(a, list | tuple)
            for i in a
        ):
            self.found["index by a mask"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Waits]:
    """Inside the block every wait is counted; ``tolist`` is no operator, so it is patched."""
    plain = torch.Tensor.tolist
    with Waits() as waits:

        def tolist(self: torch.Tensor) -> Any:
            waits.found["tolist"] += 1
            return plain(self)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        try:
            yield waits
        finally:
            torch.Tensor.tolist = plain  # type: ignore[method-assign]


def steps() -> dict[str, dict[str, int]]:
    """The waits of a step by objective and cut, on nano and the sort task."""
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
            found[f"{name}, {cut}"] = {"total": sum(waits.found.values()), **dict(sorted(waits.found.items()))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the src folder of another version of earnest")
    parser.add_argument("--json", action="store_true", help="print the counts of this version as JSON and stop")
    args = parser.parse_args()
    now = steps()
    if args.json:
        print(json.dumps(now))
        return
    before: dict[str, dict[str, int]] = {}
    if args.before is not None:
        command = [sys.executable, __file__, "--json"]
        environment = os.environ | {"PYTHONPATH": str(args.before.resolve())}
        answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        before = json.loads(answer.splitlines()[-1])
    print("| step | before | now |\n|---|---|---|")
    for name, row in now.items():
        print(f"| {name} | {before[name]['total'] if before else '-'} | {row['total']} |")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "device_syncs.json").write_text(json.dumps({"before": before, "now": now}, indent=2) + "\n")


if __name__ == "__main__":
    main()
