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

    engine, ledger = ToyEngine(number), Ledger(Bucket.open(url))
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


@pytest.mark.parametrize("case", CASES)
def test_two_replicas_are_bit_equal_over_a_bucket_and_over_gloo(case: str, ctx: Any, tmp_path: Path) -> None:
    bucket = run(ctx, tmp_path / "bucket", 2, case, real=False)
    gloo = run(ctx, tmp_path / "gloo", 2, case, real=True)
    assert torch.equal(bucket[0], gloo[0]) and torch.equal(bucket[1], gloo[1])
    assert torch.equal(bucket[0], bucket[1]) == (case != "fragments")


def test_three_replicas_agree_and_are_within_ulps_of_gloo(ctx: Any, tmp_path: Path) -> None:
    """gloo adds in another order: after 4 rounds of 3 terms each, the two ways may differ by a few ulp a round."""
    bucket = run(ctx, tmp_path / "bucket", 3, "diloco", real=False)
    gloo = run(ctx, tmp_path / "gloo", 3, "diloco", real=True)
    assert all(torch.equal(bucket[0], b) for b in bucket) and all(torch.equal(gloo[0], g) for g in gloo)
    ulp = torch.finfo(torch.float32).eps * gloo[0].abs().max()
    assert float((bucket[0] - gloo[0]).abs().max()) <= 3 * ROUNDS * float(ulp)
