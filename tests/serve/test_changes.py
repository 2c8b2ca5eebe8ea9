"""Run folders and health reach those who watch, without their asking."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx

from tests.serve.conftest import Live, serving


def _told(live: Live, wanted: str, act) -> int:
    """Watch, act, and wait for an event of this kind; its id."""
    with live.http.stream("GET", "/v1/events", timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        live.state.changes.check()  # as it is now
        act()
        kind, number = "", -1
        for line in lines:
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: ") and kind == wanted:
                assert json.loads(line[6:])["adapter"] == ("runs" if wanted == "runs" else None)
                return number
    raise AssertionError(f"the stream ended without {wanted!r}")


def test_runs_and_health_are_announced(tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        live.state.wait()
        folder = tmp_path / "data" / "runs" / "mine"
        folder.mkdir(parents=True)

        def write(name: str, text: str):
            return lambda: (folder / name).write_text(text)

        _told(live, "runs", write("run.json", "{}"))
        last = _told(live, "runs", write("metrics.jsonl", '{"kind": "step"}\n'))
        assert "mine" in [r["name"] for r in live.get("/v1/runs")["data"]]  # beside those of the working folder

        def chat() -> None:
            """Somebody waits for a turn that is taken until the health was seen."""
            with httpx.Client(base_url=live.url, timeout=60) as client:
                client.post("/v1/completions", json={"model": "base", "prompt": "Hi", "max_tokens": 2})

        thread = threading.Thread(target=chat)
        with live.state.host.turn("learn"):
            again = _told(live, "health", thread.start)
        thread.join()
        assert last == again == 0  # they take no place among the events that a late reader is given
