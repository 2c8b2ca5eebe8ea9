"""A real `earnest serve`: its users' words become pairs, and its endpoint is a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from earnest.config.loading import check_mapping
from earnest.replay import pairs as files
from earnest.replay.pipeline import count, replay
from earnest.replay.settings import ReplayConfig
from earnest.replay.traces import read
from tests.replay.records import user, write_traces
from tests.serve.conftest import serving


def settings(out: Path, **more: Any) -> ReplayConfig:
    data = {"judge": {"kind": "teacher"}, "out": str(out)} | more
    return check_mapping(ReplayConfig, data)


def test_what_a_server_keeps_is_replayed_while_it_runs(tmp_path: Path) -> None:
    """Chat twice, say something about one and type a better answer to it; then ask the same server as a teacher."""
    with serving(tmp_path) as live:
        first = live.chat("base", "Describe the fox.", max_tokens=24)
        second = live.chat("base", "Describe the sea.", max_tokens=24)
        third = live.chat("assistant", "Describe the dog.", max_tokens=24)
        said = live.teach(third, text="Too cold, be warm.", thumbs="down", better="What a lovely dog!")
        found = read(tmp_path / "data")
        assert [t.completion_id for t in found.traces] == [first["id"], second["id"], third["id"]]
        trace = found.traces[2]
        assert (trace.feedback, trace.reward, trace.meta) == (
            "Too cold, be warm.",
            0.0,
            {"better": "What a lovely dog!"},
        )
        assert trace.messages[-1]["content"] == third["choices"][0]["message"]["content"]
        assert (trace.model, trace.version) == ("assistant", 0) and found.traces[0].feedback is None
        typed = replay(tmp_path / "data", settings(tmp_path / "typed.parquet", teachers=[{"kind": "user"}]))
        assert [(p.completion_id, p.chosen["content"], p.model) for p in typed.made] == [
            (third["id"], "What a lovely dog!", "assistant")
        ]
        assert count(typed.drops) == {"no user gave a better answer": 2}

        teacher = {
            "kind": "endpoint",
            "base_url": f"{live.url}/v1",
            "model": "base",
            "temperature": 1.0,
            "max_tokens": 40,
        }
        lines = [
            {"id": str(i), "messages": [user(f"Describe the {w}."), {"role": "assistant", "content": "I will not."}]}
            for i, w in enumerate(("fox", "sea", "garden"))
        ]
        traces = write_traces(tmp_path / "t.jsonl", lines)
        asked = replay(traces, settings(tmp_path / "asked.parquet", teachers=[teacher], max_errors=0.0))
        live.learned(said)
    kept = files.read(tmp_path / "asked.parquet")
    assert len(kept) + sum(count(asked.drops).values()) == 3 and kept
    assert all(p.rejected["content"] == "I will not." and p.chosen["content"] for p in kept)
    account = asked.ledger.accounts["endpoint"]
    assert account.replies == 3 and account.prompt_tokens > 0 and account.unknown == 0
