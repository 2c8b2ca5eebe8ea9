"""The same code with torchft's real Lighthouse and Manager, in real processes: the same bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest.diloco.globals import OuterSGD
from earnest.diloco.outer import Schedule

CASES = {
    "diloco": Schedule(4),
    "local_sgd": Schedule(4, outer=None),
    "fragments": Schedule(6, fragments=2, delay=1),
    "sgd": Schedule(3, outer=OuterSGD(0.4, 0.0, False)),
}
ROUNDS = 4
WIDE = (400, 300)
"""So many numbers that gloo shares them out, and adds each share in another order."""
ULPS = 32
"""After 4 rounds of 3 terms. 11 were seen, on weights that came near to 0; most have none."""


def replica(url: str, number: int, replicas: int, case: str, lighthouse: str | None, out: str) -> None:
    """Train the toy job to the end over a bucket, or over gloo, and write the weights."""
    os.environ["RUST_LOG"] = "error"
    log = open(f"{out}.log", "w")  # noqa: SIM115
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    torch.set_num_threads(1)
    from earnest.diloco.ledger import Ledger
    from earnest.diloco.lighthouse import LighthouseOuter
    from earnest.diloco.outer import ReplicaOuter
    from earnest.diloco.protocol import Rules
    from earnest.diloco.store import Bucket
    from earnest.diloco.wire import Wire
    from tests.diloco.toy import ToyEngine

    engine, ledger = ToyEngine(number, sizes=WIDE if replicas > 2 else (7, 5)), Ledger(Bucket.open(url))
    outer: Any
    if lighthouse is None:
        rules = Rules(replicas, replicas, poll=0.01)
        outer = ReplicaOuter(engine, ledger, number, rules, CASES[case], Wire("fp32"), rounds=ROUNDS)
    else:
        outer = LighthouseOuter(engine, ledger, number, lighthouse, replicas, CASES[case], rounds=ROUNDS, timeout=60)
    outer.join(engine)
    engine.outer = outer
    while not outer.over:
        engine.step()
    torch.save(engine.flat(), out)
    if lighthouse is not None:
        os._exit(0)  # torchft's threads do not end


def run(ctx: Any, place: Path, replicas: int, case: str, real: bool) -> list[torch.Tensor]:
    from torchft.coordination import LighthouseServer

    place.mkdir()
    server = LighthouseServer(bind="[::]:0", min_replicas=replicas, join_timeout_ms=200) if real else None
    address = f"http://localhost:{server.address().rsplit(':', 1)[1]}" if server else None
    files = [place / f"{i}.pt" for i in range(replicas)]
    url = f"file://{place}/bucket"
    processes = [
        ctx.Process(target=replica, args=(url, i, replicas, case, address, str(file))) for i, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    for process, file in zip(processes, files, strict=True):
        process.join(180)
        assert process.exitcode == 0, Path(f"{file}.log").read_text()[-3000:]
    if server is not None:
        server.shutdown()
    return [torch.load(file) for file in files]


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_two_replicas_are_bit_equal_over_a_bucket_and_over_gloo(case: str, ctx: Any, tmp_path: Path) -> None:
    bucket = run(ctx, tmp_path / "bucket", 2, case, real=False)
    gloo = run(ctx, tmp_path / "gloo", 2, case, real=True)
    assert torch.equal(bucket[0], gloo[0]) and torch.equal(bucket[1], gloo[1])
    assert torch.equal(bucket[0], bucket[1]) == (case != "fragments")


@pytest.mark.processes
def test_three_replicas_agree_and_are_within_ulps_of_gloo(ctx: Any, tmp_path: Path) -> None:
    """gloo adds in another order, so each round may round differently; every weight on its own stays within ``ULPS``
    steps of its own size, not of the largest weight's."""
    bucket = run(ctx, tmp_path / "bucket", 3, "diloco", real=False)
    gloo = run(ctx, tmp_path / "gloo", 3, "diloco", real=True)
    assert all(torch.equal(bucket[0], b) for b in bucket) and all(torch.equal(gloo[0], g) for g in gloo)
    apart = ulps(bucket[0], gloo[0])
    print(f"ulps apart: at most {int(apart.max())}, none on {int((apart == 0).sum())} of {len(apart)}")
    assert int(apart.max()) <= ULPS and int(apart.median()) == 0


def ulps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How many fp32 numbers lie between, element by element: the bits of a float, read as an integer, count them."""
    numbers = [t.contiguous().view(torch.int32).long() for t in (one, other)]
    ordered = [torch.where(n < 0, -(n & 0x7FFFFFFF), n) for n in numbers]
    return (ordered[0] - ordered[1]).abs()


def test_ulps_are_counted_by_the_element() -> None:
    one = torch.tensor([1.0, 1e-20, -1.0, 0.0, 2.0])
    up = torch.nextafter(one, torch.full((5,), torch.inf))
    assert ulps(one, up).tolist() == [1] * 5
    assert ulps(torch.tensor([1.0]), torch.tensor([1.0 + 2**-20])).tolist() == [8]
