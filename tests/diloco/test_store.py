"""Objects that are written once: the envelope, the probe, lost answers, servers that overwrite."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from earnest.diloco.errors import RoundStuck
from earnest.diloco.ledger import Commit, Ledger
from earnest.store import AlreadyThere, Bucket, Damaged, Object, StoreError, Unavailable, open_store, seal, unseal

S3 = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_REGION": "us-east-1",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
}
META = st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=8)), max_size=4)


class Memory:
    """A store in a dict, with faults on request: one of ``faults`` per operation."""

    def __init__(self, *faults: str) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults = list(faults)

    def _fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""

    def create(self, key: str, data: bytes) -> None:
        fault = self._fault()
        if fault == "down":
            raise Unavailable("down")
        if fault == "conflict" or (key in self.objects and fault != "overwrite"):
            raise AlreadyThere(key)
        self.objects[key] = data
        if fault == "lost":
            raise Unavailable("the answer was lost")

    def get(self, key: str) -> bytes | None:
        if self._fault() == "down":
            raise Unavailable("down")
        return self.objects.get(key)

    def list(self, prefix: str) -> Any:
        return [k for k in list(self.objects) if k.startswith(prefix)]  # other threads add keys

    def delete(self, keys: Any) -> None:
        for key in keys:
            self.objects.pop(key, None)


class Clock:
    """A clock that moves on a sleep or on a wait for an answer."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def bucket(store: Any, clock: Clock | None = None, **more: Any) -> Bucket:
    clock = clock or Clock()
    return Bucket(store, sleep=clock.sleep, clock=lambda: clock.now, **more)


@given(payload=st.binary(max_size=200), meta=META)
def test_a_sealed_object_opens_to_what_was_sealed(payload: bytes, meta: dict[str, Any]) -> None:
    data = seal("delta", "me", payload, meta)
    found = unseal("k", data)
    assert (found.payload, found.meta, found.writer, found.kind, found.size) == (
        payload,
        meta,
        "me",
        "delta",
        len(data),
    )


@given(payload=st.binary(max_size=60), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_is_damage(payload: bytes, place: int, bit: int) -> None:
    """Also in the header: the writer's id and the meta are under the hash."""
    data = bytearray(seal("delta", "me", payload, {"round": 3}))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(Damaged):
        unseal("k", bytes(data))


@given(payload=st.binary(max_size=60), cut=st.integers(0, 10**6))
def test_any_truncation_is_damage(payload: bytes, cut: int) -> None:
    data = seal("delta", "me", payload, {})
    with pytest.raises(Damaged):
        unseal("k", data[: cut % len(data)])


def test_a_key_is_taken_once() -> None:
    store = Memory()
    one, other = bucket(store, writer="one"), bucket(store, writer="other")
    assert one.create("k", "x", b"1") and not other.create("k", "x", b"2")
    found = other.get("k")
    assert found is not None and (found.payload, found.writer) == (b"1", "one")
    assert one.create("k", "x", b"1")  # again by the same writer: it is its own
    assert not one.create("k", "x", b"3")


def test_a_lost_answer_is_recognised_as_ones_own() -> None:
    """The create succeeded, the answer was lost: the retry finds its own object."""
    store = Memory("lost")
    me = bucket(store, writer="me")
    assert me.create("k", "x", b"1")
    assert me.traffic.retries == 1
    store.faults = ["lost"]
    assert not bucket(store, writer="other").create("k", "x", b"1")  # the same payload, and still not its own


def test_a_store_that_stays_down_is_an_error() -> None:
    store = Memory("down", "down", "down")
    assert bucket(store).create("k", "x", b"1")
    store.faults = ["down"] * 1000
    with pytest.raises(StoreError, match=r"did not answer for 3 s.*nothing that is committed is lost"):
        bucket(store, patience=3.0, url="s3://b/run").get("k")


def test_the_time_limit_of_a_store_counts_the_time_that_an_attempt_hangs() -> None:
    """Each attempt fails after a minute: after two of them it is an error, not after 120 s of pauses between them."""
    clock, asked = Clock(), [0]

    class Hangs(Memory):
        def get(self, key: str) -> bytes | None:
            asked[0] += 1
            clock.now += 60.0
            raise Unavailable("timed out")

    with pytest.raises(StoreError, match="did not answer for 120 s"):
        bucket(Hangs(), clock, patience=120.0).get("k")
    assert asked == [2]


def test_a_conflict_is_not_taken_for_somebody_elses_object() -> None:
    """S3 refuses a create with 409 while another of the same key is under way; if that one fails, nothing is there."""
    store = Memory("conflict")
    me = bucket(store)
    assert me.create("k", "x", b"1") and me.traffic.retries == 1
    store.faults = ["conflict", "", "conflict"]
    ledger = Ledger(me)
    assert ledger.put_delta(0, 0, 0, b"d", {}) and ledger.delta(0, 0) is not None
    store.faults = ["conflict"]
    commit = Commit(0, (0,), (0,), (1,), "a", "b")
    assert ledger.put_commit(commit) == commit == ledger.commit(0)


def test_a_commit_that_was_removed_is_an_error() -> None:
    class Forgets(Memory):
        def get(self, key: str) -> bytes | None:
            found = super().get(key)
            self.delete([key])
            return found

    store = Forgets()
    bucket(store, writer="other").create("outer/00000000/commit", "commit", b"{}")
    with pytest.raises(RoundStuck, match="was there and is gone"):
        Ledger(bucket(store)).put_commit(Commit(0, (0,), (0,), (1,), "a", "b"))


@pytest.mark.parametrize(
    ("code", "says"), [("RequestTimeTooSkewed", "clock is wrong"), ("AccessDenied", "store's keys in the environment")]
)
def test_the_error_for_a_refused_request_names_the_cause(code: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3's answer to a wrong key and to a wrong clock is the same 403; only its body tells them apart."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for key, value in {**S3, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(StoreError, match=says):
            Bucket.open("s3://runs/a").get("k")
        server.shutdown()
        thread.join()


def test_the_probe_refuses_a_store_that_overwrites() -> None:
    good = Memory()
    bucket(good).probe()
    assert good.objects == {}  # it tidies up
    with pytest.raises(StoreError, match="does not keep what is written first"):
        bucket(Memory("", "overwrite")).probe()
    for fault in ("down", "lost"):  # a hiccup in the second create is waited out, and nothing is concluded from it
        hiccup = bucket(Memory("", fault))
        hiccup.probe()
        assert hiccup.traffic.retries == (fault == "down")


def test_a_folder_is_a_store(tmp_path: Path) -> None:
    one, other = Bucket.open(f"file://{tmp_path}/run"), Bucket.open(f"file://{tmp_path}/run")
    one.probe()
    assert one.create("a/b", "x", b"1") and not other.create("a/b", "x", b"2")
    assert other.list("a/") == ["a/b"] and other.get("nothing") is None
    (tmp_path / "run" / "a" / "b").write_bytes(b"# {}")
    with pytest.raises(Damaged):
        one.get("a/b")
    one.delete(["a/b", "a/b"])
    assert one.list("") == []


@pytest.mark.parametrize("url", ["/tmp/x", "s4://bucket/x", "http://bucket/x", ""])
def test_a_typo_in_the_url_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="s3://bucket/prefix"):
        open_store(url)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """moto's S3 in memory, as a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable,
        str(Path(sysconfig.get_path("scripts")) / "moto_server"),
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.mark.processes
def test_s3_through_moto(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    for key, value in {**S3, "AWS_ENDPOINT_URL": moto}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(StoreError, match="no such bucket"):
        Bucket.open("s3://absent/run").probe()
    urllib.request.urlopen(urllib.request.Request(f"{moto}/runs", method="PUT")).close()
    one, other = Bucket.open("s3://runs/a"), Bucket.open("s3://runs/a")
    one.probe()
    assert one.create("k", "x", b"1") and not other.create("k", "x", b"2")
    assert os.environ["AWS_ENDPOINT_URL"] == moto and other.list("") == ["k"]


def test_the_ledger_reads_back_what_it_wrote() -> None:
    ledger = Ledger(bucket(Memory()))
    commit = Commit(3, (0, 2), (0, 1), (10, 30), "a", "b")
    assert ledger.put_commit(commit) == commit == ledger.commit(3)
    assert ledger.put_commit(Commit(3, (1,), (0,), (1,), "a", "c")) == commit  # the first decision holds
    ledger.put_delta(3, 0, 0, b"", {})
    ledger.put_delta(3, 0, 1, b"", {})
    ledger.announce(3, 2)
    assert ledger.present(3) == ([(0, 0), (0, 1)], [2])
    assert [ledger.reserve(0), ledger.claim(), ledger.claim()] == [True, 1, 2]


def test_cleaning_keeps_decisions() -> None:
    """A replica that was paused must find an old round decided; see Ledger.clean."""
    ledger = Ledger(bucket(Memory()))
    for k in range(4):
        ledger.put_delta(k, 0, 0, b"", {})
        ledger.announce(k, 0)
        ledger.put_state(k, b"", "f")
        ledger.put_commit(Commit(k, (0,), (0,), (1,), "a", "b"))
    assert ledger.clean(before=2) == 6
    assert ledger.states() == [2, 3] and ledger.committed() == 4
    assert all(ledger.commit(k) for k in range(4)) and ledger.present(1) == ([], [])


def test_deltas_are_read_at_once_and_come_in_the_order_asked_for() -> None:
    """No request is answered before three are under way; the last one is answered first; one object is cut off."""
    under_way, most, gate = [0], [0], threading.Barrier(3, timeout=30)

    class Slow(Memory):
        def get(self, key: str) -> bytes | None:
            with lock:
                under_way[0] += 1
                most[0] = max(most[0], under_way[0])
            gate.wait()
            time.sleep(0.02 * (5 - int(key[-1])))
            with lock:
                under_way[0] -= 1
            return super().get(key)

    lock, store = threading.Lock(), Slow()
    ledger = Ledger(bucket(store), parallel=3)
    for i in range(6):
        ledger.put_delta(0, i, 0, bytes([i]), {"replica": i})
    (cut,) = (key for key in store.objects if key.endswith("4"))
    store.objects[cut] = store.objects[cut][:-1]
    before = ledger.bucket.traffic.requests
    found = ledger.deltas(0, [(i, 0) for i in (5, 3, 4, 1, 0, 2)])
    assert [d.payload[0] if isinstance(d, Object) else type(d) for d in found] == [5, 3, Damaged, 1, 0, 2]
    assert most == [3] and ledger.bucket.traffic.requests == before + 6


def test_keys_of_other_programs_are_passed_over() -> None:
    """A .DS_Store in the bucket ended every worker."""
    bucket = Bucket(Memory())
    ledger = Ledger(bucket)
    ledger.put_state(0, b"", "s")
    ledger.announce(0, 1)
    ledger.reserve(0)
    for place in ("state/", "workers/", "outer/00000000/", "outer/00000000/delta/", "outer/00000000/report/", "outer/"):
        bucket.store.create(f"{place}.DS_Store", b"x")
    assert ledger.states() == [0] and ledger.claim() == 1 and ledger.present(0) == ([], [1])
    assert ledger.reports(0) == [] and ledger.clean(1) == 2 and ledger.states() == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            "The operation lacked privileges: InvalidAccessKeyId\n\nDebug source:\nRetry { a: 1 }",
            r"InvalidAccessKeyId\. S",
        ),
        (
            "error sending request for url (http://169.254.169.254/latest/api/token)",
            "no keys are set, and this machine",
        ),
    ],
)
def test_wrong_and_missing_keys_are_one_sentence_at_once(
    error: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """obstore appends pages of debug output to a refusal, and requests the cloud's metadata address where no keys are
    set."""
    from obstore import exceptions

    bucket = Bucket.open(f"file://{tmp_path}/store")
    kind = exceptions.PermissionDeniedError if "privileges" in error else exceptions.GenericError

    def refuse(*_: Any, **__: Any) -> None:
        raise kind(error)

    monkeypatch.setattr(bucket.store, "_api", type("Api", (), {"get": staticmethod(refuse)}))
    with pytest.raises(StoreError, match=sentence) as found:
        bucket.get("a")
    assert "Debug" not in str(found.value) and bucket.traffic.retries == 0
