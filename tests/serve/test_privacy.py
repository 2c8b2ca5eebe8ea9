"""How long conversations are kept, and who sees them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from earnest.serve import changes
from earnest.serve.changes import ChangeWatcher
from tests.serve.conftest import Live, serving
from tests.serve.test_keys import OWNER, TEACHER, _as, _file


def test_a_key_that_sees_only_its_own(tmp_path: Path) -> None:
    path = _file(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("  name: teacher", "  sees: own\n  name: teacher"))
    with serving(tmp_path, OWNER, keys=path, adapters=("team/a",)) as live, _as(live, TEACHER) as teacher:
        theirs = live.teach(live.chat("team/a"), text="A private word.")
        ask = {"model": "team/a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        mine = teacher.post("/v1/chat/completions", json=ask).json()["id"]
        given = teacher.post("/v1/feedback", json={"completion_id": mine, "text": "My own word."}).json()
        live.learned(theirs), live.learned(given)
        listed = teacher.get("/v1/feedback", params={"adapter": "team/a"}).json()["data"]
        assert [f["id"] for f in listed] == [given["id"]]
        assert len(live.get("/v1/feedback", adapter="team/a")["data"]) == 2
        assert teacher.get(f"/v1/feedback/{theirs['id']}").status_code == 404
        assert teacher.get(f"/v1/chat/completions/{theirs['completion']}").status_code == 404
        assert teacher.get(f"/v1/chat/completions/{mine}").status_code == 200
        said = teacher.post("/v1/feedback", json={"completion_id": theirs["completion"], "text": "Hm."})
        assert said.status_code == 404
        assert teacher.get("/v1/adapters/team/a/versions/1").json()["answers"] == []
        assert live.get("/v1/adapters/team/a/versions/1")["answers"]
        seen = ""
        with teacher.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"}) as stream:
            for line in stream.iter_lines():
                seen += line
                if line.startswith("data:") and json.loads(line[5:]).get("number") == 2:
                    break
        assert "My own word." in seen and "A private word." not in seen


@pytest.fixture
def old(tmp_path: Path):
    with serving(tmp_path, keep_days=1) as live:
        yield live


def test_old_conversations_are_deleted(old: Live) -> None:
    learned = old.teach(old.chat(), text="A private word.")
    old.learned(learned)
    waiting, fresh, aged = old.chat(), old.chat(), old.chat("base")
    age = time.time() - 2 * 86400
    with old.state.host.turn("chat"):
        queued = old.teach(waiting, text="It waits.")
        for found in (learned["completion"], waiting["id"], aged["id"]):
            old.state.store.db.write(
                lambda c, n=found: c.execute("UPDATE completions SET created = ? WHERE id = ?", (age, n))
            )
        ChangeWatcher(old.state).purge()
        kept = {n: old.http.get(f"/v1/chat/completions/{n}").status_code for n in (waiting["id"], fresh["id"])}
        gone = {old.http.get(f"/v1/chat/completions/{n}").status_code for n in (learned["completion"], aged["id"])}
    assert set(kept.values()) == {200} and gone == {404}
    assert old.get(f"/v1/feedback/{learned['id']}")["text"] is None
    assert old.learned(queued)["status"] == "applied"
    assert old.http.delete(f"/v1/chat/completions/{fresh['id']}").json()["deleted"] is True
    assert old.post("/v1/adapters/assistant/purge", {"before": time.time() + 1})["deleted"] == 1
    assert old.http.get(f"/v1/chat/completions/{waiting['id']}").status_code == 404


def test_the_server_deletes_them_by_itself_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "EVERY", 0.01)
    monkeypatch.setattr(changes, "PURGE_EVERY", 0.02)
    limits: list[float] = []
    state: Any = SimpleNamespace(
        settings=SimpleNamespace(keep_days=2),
        store=SimpleNamespace(purge=limits.append),
        bus=SimpleNamespace(watched=False),
    )
    watcher = ChangeWatcher(state)
    watcher.start()
    end = time.monotonic() + 30
    while len(limits) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    watcher.close()
    assert len(limits) >= 2
    assert all(limit == pytest.approx(time.time() - 2 * 86400, abs=60) for limit in limits)
