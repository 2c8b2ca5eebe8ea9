"""The same code with torchft's real Lighthouse and Manager, in real processes: the same bits."""

from __future__ import annotations

import os
import sys
import time
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest.config.replicas import SyncConfig
from earnest.diloco.errors import Unreachable
from earnest.diloco.globals import OuterSGD
from earnest.diloco.outer import ReplicaOuter, SyncSchedule
from earnest.errors import CheckpointError

CASES = {
    "diloco": SyncSchedule(4),
    "local_sgd": SyncSchedule(4, outer=None),
    "fragments": SyncSchedule(6, fragments=2, delay=1),
    "sgd": SyncSchedule(3, outer=OuterSGD(0.4, 0.0, False)),
}
ROUNDS = 4
WIDE = (400, 300)
"""Enough numbers that gloo splits them, and adds each part in another order."""
ULPS = 32
"""After 4 rounds of 3 terms. 11 were seen, on weights that came near to 0; most have none."""


def _alone(out: str) -> None:
    """A process of its own: one thread, with its output in its log."""
    os.environ["RUST_LOG"] = "error"
    log = open(f"{out}.log", "w")  # noqa: SIM115 (as long as the process)
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    torch.set_num_threads(1)


def replica(url: str, number: int, replicas: int, case: str, lighthouse: str | None, out: str) -> None:
    """Train the toy job to the end over a bucket, or over gloo, and write the weights."""
    _alone(out)
    from earnest.diloco.ledger import Ledger
    from earnest.diloco.lighthouse import LighthouseOuter
    from earnest.diloco.outer import ReplicaOuter
    from earnest.diloco.protocol import Rules
    from earnest.diloco.wire import Wire
    from earnest.store import Bucket
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
    typical = torch.finfo(gloo[0].dtype).eps * float(gloo[0].abs().median())  # for weights that are almost 0
    near = (apart <= ULPS) | ((bucket[0] - gloo[0]).abs() <= ULPS * typical)
    assert bool(near.all()) and int(apart.median()) == 0


def late(url: str, address: str, out: str) -> None:
    """Replica 0 trains two rounds alone; replica 1 comes with the first state, and is healed where it sends, in the
    middle of its first round. Both are threads of this process. Written: the weights of 0 at that send, and those that
    1 goes on with."""
    _alone(out)
    from concurrent.futures import ThreadPoolExecutor

    from earnest.diloco.ledger import Ledger
    from earnest.diloco.lighthouse import LighthouseOuter
    from earnest.store import Bucket
    from tests.diloco.toy import ToyEngine

    def made(number: int) -> tuple[ToyEngine, Any]:
        engine, ledger = ToyEngine(number), Ledger(Bucket.open(url))
        outer = LighthouseOuter(engine, ledger, number, address, 1, CASES["fragments"], rounds=4, timeout=60)
        outer.join(engine)
        engine.outer = outer  # type: ignore[assignment]
        return engine, outer

    def train(engine: ToyEngine, outer: Any) -> dict[tuple[int, int], torch.Tensor]:
        """To the end: the weights after each update, by (round, update)."""
        seen = {}
        while not outer.over:
            engine.step()
            seen[outer.round, outer.inner] = engine.flat()
        return seen

    first, one = made(0)
    while one.round < 2:
        first.step()
    second, other = made(1)
    assert other.round == 0
    with ThreadPoolExecutor(2) as pool:
        healed = pool.submit(train, second, other)
        while other.inner < 2:
            time.sleep(0.01)
        time.sleep(1.0)  # now it asks; whoever was in the last quorum would not be made to wait for it
        ahead = pool.submit(train, first, one)
        found = ahead.result(), healed.result()
    assert other.heals == 1, other.heals
    torch.save([seen[2, 2] for seen in found] + [seen[3, 0] for seen in found], out)
    os._exit(0)  # torchft's threads do not end


@pytest.mark.processes
def test_who_is_healed_before_the_end_of_a_round_trains_on_from_there(ctx: Any, tmp_path: Path) -> None:
    """With a delay torchft heals at the send. The weights go into the engine then, and not only the copies, which are
    overwritten by the engine's at the end of the round."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000)
    address, out = f"http://localhost:{server.address().rsplit(':', 1)[1]}", tmp_path / "late.pt"
    process = ctx.Process(target=late, args=(f"file://{tmp_path}/bucket", address, str(out)))
    process.start()
    process.join(120)
    server.shutdown()
    assert process.exitcode == 0, Path(f"{out}.log").read_text()[-3000:]
    ahead, healed, after_ahead, after_healed = torch.load(out)
    assert torch.equal(ahead, healed)
    assert torch.equal(after_ahead[:7], after_healed[:7])  # the fragment of round 2
    # The other one is one update of each replica's own apart, and not what replica 1 had come with.
    assert float((after_ahead[7:] - after_healed[7:]).abs().max()) <= 2.5 * 0.05


def test_a_lighthouse_that_is_not_there_is_said(tmp_path: Path) -> None:
    from earnest.diloco.ledger import Ledger
    from earnest.diloco.lighthouse import LighthouseOuter
    from earnest.store import Bucket
    from tests.diloco.toy import ToyEngine

    ledger = Ledger(Bucket.open(f"file://{tmp_path}/bucket"))
    says = r"sync\.lighthouse=http://localhost:9 does not answer.*torchft_lighthouse.*or leave it out"
    with pytest.raises(Unreachable, match=says):
        LighthouseOuter(ToyEngine(), ledger, 0, "http://localhost:9", 1, CASES["diloco"], rounds=1, timeout=1.0)
    made = object.__new__(LighthouseOuter)
    for use in (made.state_dict, lambda: made.load_state_dict({})):
        with pytest.raises(CheckpointError, match="keep no checkpoint"):
            use()
    for outer in (LighthouseOuter, ReplicaOuter):
        assert signature(outer).parameters["snapshot_every"].default == SyncConfig().snapshot_every


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
