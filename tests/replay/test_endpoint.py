"""Retries, refusals and counts, against a real HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earnest.http import wait
from earnest.replay.endpoint import Endpoint, Reply, RetriesExhausted, Usage
from earnest.replay.errors import EndpointError
from earnest.replay.journal import Journal
from earnest.replay.judges import add
from earnest.replay.settings import ReplayConfig
from tests.replay.records import user
from tests.replay.server import Answer, serving


def ask(url: str, **more: Any) -> Reply:
    endpoint = Endpoint(url, "teacher", key="REPLAY_TEST_KEY", attempts=5, backoff=0.01, timeout=5.0)
    return endpoint.chat([user("hi")], name="t#0|x|0", temperature=0.5, max_tokens=7, **more)


FAILURES = [
    Answer(status=429, raw="slow down", headers={"Retry-After": "0.02"}),
    Answer(status=503, raw="busy", headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
    Answer(drop=True),
    Answer(raw="<html>"),
    Answer(raw='{"choices": []}'),
]


@pytest.mark.parametrize("first", FAILURES, ids=["429", "503", "dropped", "not JSON", "no choice"])
def test_temporary_errors_are_tried_again(first: Answer) -> None:
    with serving(lambda body, before: first if before == 0 else Answer("hello")) as server:
        found = ask(server.url)
    assert found.message == {"role": "assistant", "content": "hello"}
    assert found.usage == Usage(2, 10, 5) and len(server.bodies) == 2


def test_the_request_has_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAY_TEST_KEY", "sk-1")
    tool = {"type": "function", "function": {"name": "clock"}}
    called = [{"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]
    with serving(lambda *_: Answer(None, called, usage=None)) as server:
        found = ask(server.url, tools=[tool], seed=3)
        monkeypatch.delenv("REPLAY_TEST_KEY")
        ask(server.url)
    assert server.bodies[0] == {
        "model": "teacher",
        "messages": [user("hi")],
        "temperature": 0.5,
        "max_tokens": 7,
        "tools": [tool],
        "seed": 3,
    }
    assert "tools" not in server.bodies[1] and "seed" not in server.bodies[1]
    assert server.keys == ["Bearer sk-1", None]
    assert found.message["tool_calls"] == called and found.usage == Usage(1, None, None)


def test_a_refusal_stops_at_once_and_says_where_the_key_comes_from() -> None:
    with serving(lambda *_: Answer(status=401, raw="bad key")) as server:
        with pytest.raises(EndpointError, match=r"HTTP 401: bad key\. Is \$REPLAY_TEST_KEY set"):
            ask(server.url)
        assert len(server.bodies) == 1
    with pytest.raises(EndpointError, match="is not an http"):
        ask("ftp://nowhere")


def test_the_error_after_the_last_try_has_the_last_reason() -> None:
    with serving(lambda *_: Answer(status=500, raw="broken")) as server:
        with pytest.raises(RetriesExhausted, match=r"failed 5 times on t#0\|x\|0; the last time: HTTP 500: broken"):
            ask(server.url)
        assert len(server.bodies) == 5
    with pytest.raises(RetriesExhausted, match="refused"):  # nobody listens any more
        ask(server.url)


def test_waits_double_are_bounded_and_repeat_themselves() -> None:
    for attempt in range(1, 12):
        longest = min(60.0, 2.0 ** (attempt - 1))
        assert longest / 2 <= wait("a", attempt, 1.0) < longest
        assert wait("a", attempt, 1.0) == wait("a", attempt, 1.0)
    assert wait("a", 3, 1.0) != wait("b", 3, 1.0), "requests that failed together do not come back together"


def test_usage_adds_up_and_stays_unknown() -> None:
    assert add([Usage(1, 2, 3), Usage(2, 10, 20)]) == Usage(3, 12, 23)
    assert add([Usage(1, 2, 3), Usage(1, None, 4)]) == Usage(2, None, 7)


def test_an_endpoint_has_the_defaults_of_a_replay() -> None:
    config = ReplayConfig.model_fields
    made = Endpoint("http://x/v1", "teacher")
    assert {name: getattr(made, name) for name in ("attempts", "backoff", "timeout")} == {
        name: config[name].default for name in ("attempts", "backoff", "timeout")
    }


def test_an_answer_is_kept_once_and_written_under_the_lock(tmp_path: Path) -> None:
    journal, held = Journal(tmp_path / "j.jsonl", {}, "t"), []
    append = journal._lines.append
    journal._lines.append = lambda record: held.append(journal._lock.locked()) or append(record)  # type: ignore[method-assign, func-returns-value, assignment]
    first = journal.add("answer", "a", text="one")
    assert journal.add("answer", "a", text="two") is first and held == [True] and not journal._lock.locked()
