"""The toy job as a process: the protocol, the manager and torchft for real, at a hundredth of an RL step's cost."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROUNDS = 230


def toy_main(url: str, replica: int, folder: str, environment: Mapping[str, str], plan: Mapping[str, Any]) -> None:
    """Train to the end, with one atomic checkpoint per round; dies at the point in ``plan``."""
    os.environ.update(environment)
    log = open(f"{folder}.log", "a", buffering=1)  # noqa: SIM115 (as long as the process)
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    import torch

    from earnest.diloco.ledger import Ledger
    from earnest.diloco.outer import ReplicaOuter, SyncSchedule
    from earnest.diloco.protocol import Rules
    from earnest.diloco.wire import Wire
    from earnest.store import Bucket
    from tests.diloco.processes import die
    from tests.diloco.toy import ToyEngine

    if "die" in plan:
        die(*plan["die"])
    engine = ToyEngine(replica, sizes=(40, 30))
    rules = Rules(4, 1, grace=3600.0, poll=0.02)
    ledger = Ledger(Bucket.open(url, writer=str(replica)))
    outer = ReplicaOuter(engine, ledger, replica, rules, SyncSchedule(2), Wire("int4"), rounds=ROUNDS, snapshot_every=5)
    saved = Path(f"{folder}.pt")
    if saved.exists():
        state = torch.load(saved)
        for p, w in zip(engine.parameters, state["weights"], strict=True):
            p.data.copy_(w)
        engine.optimizer.load_state_dict(state["optimizer"])
        outer.load_state_dict(state["outer"])
    outer.join(engine)
    engine.outer = outer  # type: ignore[assignment]
    engine.version = outer.updates
    while not outer.over:
        engine.step()
        engine.version = outer.updates
        if outer.between:
            state = {
                "weights": [p.detach().clone() for p in engine.parameters],
                "optimizer": engine.optimizer.state_dict(),
                "outer": outer.state_dict(),
            }
            torch.save(state, f"{folder}.new")
            os.replace(f"{folder}.new", saved)
