"""A server that starts again with other settings for learning: the versions go on, or the refusal has a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from earnest.engines import checkpoint
from tests.serve.conftest import Live, serving

SMALL = {"prompts": ["Hi!"], "samples": 2, "max_new_tokens": 2, "self_similarity": 1, "entropy_ratio": 0, "drift": 50}
LORA = {"kind": "lora", "rank": 4}


def _settings(folder: Path, **keys: Any) -> Path:
    path = folder / "other.yaml"
    path.write_text(json.dumps({"adapter": LORA, "updates": 2, "gate": SMALL, **keys}))
    return path


def _list(live: Live, count: int) -> list[dict[str, Any]]:
    """Several feedbacks in one request, and what became of them."""
    items = [{"completion_id": live.chat("assistant", seed=i)["id"], "text": "Too cold."} for i in range(count)]
    found = live.http.post("/v1/feedback", json={"feedback": items})
    assert found.status_code == 202, found.text
    return [live.learned(f) for f in found.json()["data"]]


def _engine(live: Live, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    row = live.state.store.adapter("assistant")
    return checkpoint.read(live.state.store.version_folder(row.id, version) / "engine")


def test_other_settings_at_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another rate keeps the optimizer's state, another optimizer starts it anew and the version states it, another
    average of the teacher too; another rank is refused with a way out, and every failure is visible."""
    caplog.set_level("INFO", "earnest.serve")
    with serving(tmp_path, learn=_settings(tmp_path, optimizer={"lr": 1e-3})) as live:
        assert [f["status"] for f in _list(live, 1)] == ["applied"]

    with serving(tmp_path, learn=_settings(tmp_path, optimizer={"lr": 2e-3})) as live:
        assert [(f["status"], f["version"], f["note"]) for f in _list(live, 1)] == [("applied", 2, "")]
        tensors, meta = _engine(live, 2)
        assert {float(v) for k, v in tensors.items() if k.endswith(".step")} == {4.0}, "the moments went on"
        assert {g["lr"] for g in meta["optimizer"]["groups"]} == {2e-3}, "and the new rate is used"
        assert live.get("/v1/adapters/assistant/versions/2")["notes"] == []
        assert "failed_feedback" not in live.get("/health")

    anew = "the optimizer's settings changed, so its state starts anew"
    begins = "the teacher's settings changed, so its average starts from version 2's weights"
    other = {"optimizer": {"lr": 2e-3, "betas": [0.8, 0.99]}, "teacher": {"kind": "ema", "mix": 0.001}}
    caplog.clear()
    with serving(tmp_path, learn=_settings(tmp_path, **other)) as live:
        given = _list(live, 1)
        assert [(f["status"], f["version"]) for f in given] == [("applied", 3)]
        after = _engine(live, 3)[0]
        assert {float(v) for k, v in after.items() if k.endswith(".step")} == {2.0}
        version = live.get("/v1/adapters/assistant/versions/3")
        sampled = live.state.store.completion(given[0]["completion"]).logprobs  # by version 2
        known = pytest.approx(sum(sampled) / len(sampled), abs=1e-4)
        assert version["metrics"]["logprob_before"]["rollout"] == known, "the weights of version 2 go on"
        average = sum(float(v.norm()) ** 2 for k, v in after.items() if k.startswith("outer.")) ** 0.5
        whole = live.get("/v1/adapters/assistant/diff", old=0, new=2)["weights"]["change"]
        assert average > 0.5 * whole > 0, "the average starts at version 2, not at the base"
        assert version["notes"] == [anew, begins]
        assert [anew in r.message for r in caplog.records if "version 3 is live" in r.message] == [True]

    caplog.clear()
    with serving(tmp_path, learn=_settings(tmp_path, adapter={"kind": "lora", "rank": 2})) as live:
        assert [f["status"] for f in _list(live, 1)] == ["failed"]
        reason = _list(live, 2)[0]["note"]
        assert "version 3 of assistant was made with adapter.rank 4, the settings have 2" in reason
        assert "POST /v1/adapters/assistant/rollback" in reason and "--learn" in reason
        lines = [r.message for r in caplog.records if r.levelname == "ERROR"]
        assert [reason in line for line in lines] == [True] * 4, "one line at the start, one for each failed update"
        assert live.get("/health")["failed_feedback"] == 3
        # The way out; and a failed list of earlier does not divide the next one.
        live.post("/v1/adapters/assistant/rollback", {"version": 0})
        assert [(f["status"], f["version"]) for f in _list(live, 3)] == [("applied", 4)] * 3
        assert live.get("/v1/adapters/assistant/versions/4")["parent"] == 0
