"""``AuditCallback`` on TRL's other trainers and documented settings: no alarm; an error in them fails."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest_audit import AuditCallback, WatchWarning
from tests.audit.trainers.cases import OPTIONS, QUICK, reward

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


FIRST = {f"{name}, fp32, seed 0" for name in QUICK}
RUNS = {
    f"{n}, {dtype}, seed {seed}": (n, dtype, seed) for n in OPTIONS for dtype in ("fp32", "bf16") for seed in range(20)
}


MAY_WARN = {"DPO, apo_down": "metric mean_token_accuracy"}  # it is 0 in all states at some seeds
"""Names -> what a row with known exceptions may warn of."""


def audited(name: str, folder: Path, seed: int, **more: Any) -> AuditCallback:
    make, settings = OPTIONS[name]
    callback = AuditCallback()
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        if name in MAY_WARN:
            warnings.filterwarnings("ignore", f".*{MAY_WARN[name]}.*Right steps do the same", WatchWarning)
        make(folder, seed, torch.float32, [callback], **{"max_steps": 1, **settings, **more}).train()
    return callback


@pytest.mark.parametrize("run", [pytest.param(r, marks=() if r in FIRST else pytest.mark.slow) for r in RUNS])
def test_a_documented_setting_raises_nothing(run: str, tmp_path: Path) -> None:
    name, dtype, seed = RUNS[run]
    callback = audited(name, tmp_path, seed, **({"bf16": True} if dtype == "bf16" else {}))
    assert callback.audited is not None and callback.audited.holds, str(callback.audited)


def test_a_reward_model_that_prefers_the_rejected_is_seen(tmp_path: Path) -> None:
    callback = AuditCallback()
    trainer = reward(tmp_path, 0, torch.float32, [callback], max_steps=1)
    own = type(trainer).compute_loss

    class Turned(type(trainer)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            return own(self, model, {k: v.roll(len(v) // 2, 0) for k, v in inputs.items()}, **more)

    trainer.__class__ = Turned
    with pytest.warns(WatchWarning, match="widens the margin"):
        trainer.train()
    assert callback.audited is not None
    assert "descending widens the margin" in {f.subject for f in callback.audited.failures}
