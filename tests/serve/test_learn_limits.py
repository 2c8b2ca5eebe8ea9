"""Limits of a client's `learn` settings, turns between adapters, and cancelling."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from earnest.errors import EarnestError
from earnest.serve import ServeSettings
from earnest.serve.gate import _margin
from earnest.serve.server import run
from tests.serve.conftest import Live, serving
from tests.serve.test_keys import OWNER, _as, _file
from tests.serve.test_learning import SMALL


@pytest.mark.parametrize(
    ("learn", "name"),
    [
        ({"updates": 10**6}, "updates"),
        ({"adapter": {"kind": "lora", "rank": 4096}}, "rank"),
        ({"adapter": {"kind": "oft", "block": 4096}}, "rank"),
        ({"batch": 10**6}, "batch"),
        ({"micro_tokens": 10**9}, "micro_tokens"),
        ({"objective": [{"kind": "sdpo", "name": f"t{i}"} for i in range(9)]}, "terms"),
        ({"gate": {"prompts": ["Hi!"] * 1000}}, "prompts"),
        ({"gate": {"prompts": ["x" * 100_000]}}, "characters"),
        ({"gate": {"samples": 1000}}, "samples"),
        ({"gate": {"max_new_tokens": 100_000}}, "max_new_tokens"),
        ({"gate": {"pairs": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 100}}, "pairs"),
        ({"thumbs": {"up": "x" * 100_000}}, "characters"),
    ],
)
def test_everything_in_learn_has_a_bound(live: Live, learn: dict[str, Any], name: str) -> None:
    refused = live.http.post("/v1/adapters", json={"name": "greedy", "learn": learn})
    assert refused.status_code == 400, refused.text
    assert f"learn: {name} is " in refused.json()["error"]["message"]
    assert "allows at most" in refused.json()["error"]["message"]


def test_a_margin_may_lose_exactly_the_room_it_has() -> None:
    assert [_margin(1.0, after, 0.5).outcome for after in (0.5, 0.49, None)] == ["holds", "fails", "not applicable"]


def test_a_key_has_limits_of_its_own(tmp_path: Path) -> None:
    path = _file(tmp_path)
    path.write_text(path.read_text().replace("- allow:", "- limits: {updates: 3}\n  allow:"))
    with serving(tmp_path, OWNER, keys=path) as live, _as(live, OWNER) as owner:
        for updates, status in ((4, 400), (3, 201)):
            body = {"name": f"team/u{updates}", "learn": {"updates": updates}}
            assert owner.post("/v1/adapters", json=body).status_code == status


def test_learn_can_be_forbidden(tmp_path: Path) -> None:
    with serving(tmp_path, client_learn=False) as live:
        refused = live.http.post("/v1/adapters", json={"name": "a", "learn": {"updates": 1}})
        assert refused.status_code == 403 and "--no-client-learn" in refused.json()["error"]["message"]
        live.post("/v1/adapters", {"name": "a"}, 201)
        assert live.learned(live.teach(live.chat("a"), text="Too cold."))["status"] == "applied"


def test_adapters_take_turns(live: Live, adapter) -> None:
    """One with much feedback does not keep the learner from one with little that came later."""
    many, few = (adapter(name, updates=1, batch=1, gate=SMALL) for name in ("many", "few"))
    chats = {name: live.chat(name) for name in (many, few)}
    with live.state.host.turn("chat"):  # nothing is learned until all of it waits
        given = [live.teach(chats[many], text="Too cold.") for _ in range(5)]
        last = live.teach(chats[few], text="Too cold.")
    live.learned(last)
    waiting = [f for f in given if live.get(f"/v1/feedback/{f['id']}")["status"] == "queued"]
    assert len(waiting) >= 3
    assert live.post(f"/v1/adapters/{many}/cancel")["cancelled"]


def _learning(live: Live, name: str) -> None:
    while (live.get("/health")["learning"] or {}).get("adapter") != name:
        time.sleep(0.01)


def _idle(live: Live, name: str) -> bool:
    return (live.get("/health")["learning"] or {}).get("adapter") != name


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_an_update_can_be_ended(live: Live, adapter, how: str) -> None:
    name = adapter(f"long-{how}", updates=32, gate=SMALL)
    given = live.teach(live.chat(name), text="Too cold.")
    _learning(live, name)
    if how == "cancel":
        assert live.post(f"/v1/adapters/{name}/cancel")["cancelled"] == [given["id"]]
    else:
        assert live.http.delete(f"/v1/adapters/{name}").status_code == 200
    began = time.monotonic()
    while not _idle(live, name):
        time.sleep(0.01)
    assert time.monotonic() - began < 5
    if how == "cancel":
        found = live.get(f"/v1/feedback/{given['id']}")
        assert found["status"] == "cancelled" and live.get(f"/v1/adapters/{name}/versions")["data"] == []
        assert live.learned(live.teach(live.chat(name, max_tokens=2), thumbs="down"))["status"] != "queued"


def test_a_queued_feedback_can_be_withdrawn(live: Live, adapter) -> None:
    name = adapter("second-thoughts", updates=1, gate=SMALL)
    chat = live.chat(name)
    with live.state.host.turn("chat"):
        first, second = (live.teach(chat, text=f"Too cold, {i}.") for i in range(2))
        gone = live.http.delete(f"/v1/feedback/{second['id']}")
        assert gone.status_code == 200 and gone.json()["status"] == "cancelled"
    # An update that had both under way makes no version of them: the first is learned from alone.
    assert live.learned(first)["status"] == "applied"
    versions = live.get(f"/v1/adapters/{name}/versions")["data"]
    assert [v["feedback"] for v in versions] == [[first["id"]]]
    assert live.http.delete(f"/v1/feedback/{first['id']}").status_code == 409


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "./no-such-folder"}, "There is no folder './no-such-folder'"),
        ({"learn": "learn.yaml"}, "learn.yaml: updates: "),
    ],
)
def test_a_mistake_in_the_settings_ends_the_server_before_it_makes_its_folder(
    tmp_path: Path, given: dict[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "learn.yaml").write_text("updates: many\n")
    if "learn" in given:
        given = {"learn": str(tmp_path / given["learn"])}
    with pytest.raises(EarnestError) as found:
        run(ServeSettings.model_validate({"port": 0, "data": tmp_path / "data", **given}))
    assert sentence in str(found.value)
    assert not (tmp_path / "data").exists() and capsys.readouterr().out == ""
