"""The store: exact round trips, all or nothing, at most once; two servers never share a folder."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import uuid
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from earnest.errors import ConfigError, EarnestError
from earnest.serve import versions
from earnest.serve.database import Database
from earnest.serve.errors import BadRequest, Busy, Conflict, NoModel, NotFound
from earnest.serve.names import check_name
from earnest.serve.rows import NewFeedback, StoredCompletion
from earnest.serve.store import ServerStore

floats = st.floats(max_value=0, allow_nan=False, allow_infinity=False)


@pytest.fixture
def store(tmp_path: Path):
    found = ServerStore(tmp_path)
    yield found
    found.close()


def _given(store: ServerStore, name: str = "c1", **more) -> StoredCompletion:
    fields = {
        "choice": 0,
        "model": "assistant",
        "version": 0,
        "kind": "chat",
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": (1, 2),
        "tokens": (3,),
        "logprobs": (-0.1,),
        "temperature": 1.0,
        "text": "x",
        "finish": "stop",
    }
    made = StoredCompletion(id=name, **{**fields, **more})
    store.add_completions([made]).result()
    return made


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), floats), min_size=1, max_size=30),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
)
def test_completions_come_back_exactly(tmp_path_factory, tokens, text: str) -> None:
    store = ServerStore(tmp_path_factory.mktemp("store"))
    try:
        ids, values = zip(*tokens, strict=True)
        made = _given(store, tokens=ids, logprobs=values, text=text, messages=[{"role": "user", "content": text}])
        assert store.completion("c1") == made
    finally:
        store.close()


def test_settings_of_the_file(store: ServerStore) -> None:
    """A commit is on the disk when it returns: WAL, and synchronous FULL (2) on the connection that writes."""
    assert store.db.read("PRAGMA journal_mode")[0][0] == "wal"
    assert store.db.write(lambda c: c.execute("PRAGMA synchronous").fetchone()[0]) == 2


def test_a_failing_write_rolls_back_only_itself(tmp_path: Path) -> None:
    db = Database(tmp_path / "x.sqlite3", "CREATE TABLE t(n INTEGER UNIQUE)")
    gate = threading.Event()
    first = db.submit(lambda c: gate.wait())  # the three below are committed together
    good, bad, other = (
        db.submit(lambda c, n=n: c.execute("INSERT INTO t VALUES(?)", (n,)).rowcount) for n in (1, 1, 2)
    )
    gate.set()
    assert (first.result(), good.result(), other.result()) == (True, 1, 1)
    with pytest.raises(sqlite3.IntegrityError):
        bad.result()
    assert [r["n"] for r in db.read("SELECT n FROM t ORDER BY n")] == [1, 2]
    db.close()
    with pytest.raises(RuntimeError, match="closed"):
        db.write(lambda c: None)


def test_the_queue_has_a_limit(store: ServerStore) -> None:
    row = store.create("a", {})
    _given(store)
    said = [(NewFeedback("c1", text=str(i), id=f"f{i}"), row) for i in range(3)]
    store.add_feedback(said, "", 3)
    with pytest.raises(Busy, match="3 feedbacks waiting"):
        store.add_feedback([(NewFeedback("c1", text="x"), row)], "", 3)
    assert len(store.queued(row.id, 10)) == 3  # the refused one left nothing behind
    assert [k for _, k in store.add_feedback(said, "", 3)] == [True] * 3  # known ones are no more load
    with pytest.raises(Conflict):
        store.add_feedback([(NewFeedback("c1", text="other", id="f1"), row)], "", 9)


def test_a_list_of_feedback_is_seen_whole_or_not_at_all(store: ServerStore, monkeypatch) -> None:
    """Another connection, which reads while the rows of one request are written, sees none of them until all are
    there: so the learner cannot make a version of the first one alone."""
    adapter = store.create("assistant", {})
    _given(store)
    seen: list[int] = []
    real = uuid.uuid4

    def between() -> uuid.UUID:
        seen.append(len(store.queued(adapter.id, 99)))
        return real()

    monkeypatch.setattr(uuid, "uuid4", between)
    store.add_feedback([(NewFeedback("c1", text=str(i)), adapter) for i in range(8)], "", 100)
    assert seen == [0] * 8 and len(store.queued(adapter.id, 99)) == 8


def test_applied_twice_is_impossible(store: ServerStore) -> None:
    row = store.create("a", {})
    _given(store)
    ((f, _),) = store.add_feedback([(NewFeedback("c1", text="x"), row)], "", 9)
    record = {"feedback": [f.id]}
    assert store.add_version(row.id, 1, 0, record, [f.seq], {}, "") == "promoted"
    with pytest.raises(AssertionError, match="twice"):
        store.add_version(row.id, 2, 1, record, [f.seq], {}, "")
    assert [v.number for v in store.versions(row.id)] == [1] and store.adapter("a").live == 1


def test_a_version_made_from_a_past_one_is_a_candidate(store: ServerStore) -> None:
    row = store.create("a", {})
    assert store.add_version(row.id, 1, 0, {}, (), {}, "") == "promoted"
    store.set_live(row.id, 0)
    assert store.add_version(row.id, 2, 1, {}, (), {}, "") == "candidate"
    assert "version 0 became live" in store.version(row, 2).reason
    store.delete(row.id)
    assert store.add_version(row.id, 3, 0, {}, (), {}, "") is None
    with pytest.raises(NoModel):
        store.adapter("a")


def test_a_live_version_cannot_be_deleted(store: ServerStore) -> None:
    """Checks and changes are one transaction: a version is live or deleted, never both; a refusal changes nothing."""
    row = store.create("a", {})
    for number, parent in ((1, 0), (2, 1), (3, 1)):
        store.add_version(row.id, number, parent, {}, (), {}, "" if number < 3 else "refused")
    before = store.adapter("a")
    for work, error, words in (
        (lambda: store.pin(row.id, 9), NotFound, "has no version 9"),
        (lambda: store.set_live(row.id, 9), NotFound, r"it has \[1, 2, 3\]"),
        (lambda: store.set_live(row.id, 3, candidates=False), Conflict, "promote it instead"),
        (lambda: store.delete_version(row.id, 2), Conflict, "is live"),
        (lambda: store.delete_version(row.id, 1), Conflict, "was made from version 1"),
        (lambda: store.delete_version(row.id, 9), NotFound, "has no version 9"),
        (lambda: store.pin(99, 1), NoModel, "deleted"),
    ):
        with pytest.raises(error, match=words):
            work()
        assert store.adapter("a") == before and len(store.versions(row.id)) == 3
    store.set_live(row.id, None)
    assert store.adapter("a").live == 1
    store.pin(row.id, 0)
    assert (store.adapter("a").live, store.adapter("a").pinned) == (0, True)
    with pytest.raises(Conflict, match="nothing before it"):
        store.set_live(row.id, None)

    # Both are asked for while the writer is busy; whoever is first, the other is refused.
    errors: list[Exception] = []

    def attempt(work) -> None:
        try:
            work()
        except (Conflict, NotFound) as error:
            errors.append(error)

    gate = threading.Event()
    store.db.submit(lambda c: gate.wait())
    threads = [
        threading.Thread(target=attempt, args=(work,))
        for work in (lambda: store.delete_version(row.id, 2), lambda: store.pin(row.id, 2))
    ]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    known = [v.number for v in store.versions(row.id)]
    assert (
        len(errors) == 1 and store.adapter("a").live in (0, *known) and (2 in known) == (store.adapter("a").live == 2)
    )


def _forkable(folder: Path):
    """The parts of a server that never loads its model; "a" has a version 1 on the disk."""
    found = _state(folder)
    row = found.store.create("a", {})
    for part in ("adapter", "engine"):
        (found.store.version_folder(row.id, 1) / part).mkdir(parents=True)
        (found.store.version_folder(row.id, 1) / part / "weights").write_text(part)
    found.store.add_version(row.id, 1, 0, {"feedback": ["f"], "metrics": {}}, (), {}, "")
    return found


def _state(folder: Path):
    from earnest.serve.settings import ServeSettings
    from earnest.serve.state import State

    return State(ServeSettings(data=folder))


def _folders(state) -> list[str]:
    return sorted(p.name for p in (state.settings.data / "adapters").iterdir())


@pytest.fixture
def state(tmp_path: Path):
    found = _forkable(tmp_path)
    yield found
    found.close()


def test_a_fork_is_atomic(state, monkeypatch) -> None:
    """A full disk in the middle of a fork leaves neither a name that answers as the base nor a folder."""
    row = state.store.adapter("a")
    with monkeypatch.context() as patch:

        def full(path: Path) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(versions, "sync", full)
        with pytest.raises(OSError, match="No space left"):
            versions.fork(state, row, 1, "b")
    assert "b" not in [a.name for a in state.store.adapters()] and _folders(state) == [str(row.id)]
    made = versions.fork(state, row, 1, "b")
    assert (made.live, made.next, made.origin) == (1, 2, "a@1") and made.id > row.id + 1
    assert (state.store.version_folder(made.id, 1) / "engine" / "weights").read_text() == "engine"
    assert state.store.version(made, 1).record["forked_from"] == "a@1"
    with pytest.raises(Conflict, match="already"):
        versions.fork(state, row, 1, "b")
    assert _folders(state) == sorted([str(row.id), str(made.id)])


def test_a_fork_that_was_killed_is_swept(monkeypatch, tmp_path: Path) -> None:
    """Killed between the folder and the commit: no name, and the folder goes at the next start. A folder that this
    database knows nothing about stays."""

    state = _forkable(tmp_path)

    def killed(*_) -> None:
        raise SystemExit

    monkeypatch.setattr(state.store, "add_whole", killed)
    with pytest.raises(SystemExit):
        versions.fork(state, state.store.adapter("a"), 1, "b")
    kept = str(state.store.adapter("a").id)
    for name in ("999", "notes"):
        (tmp_path / "adapters" / name).mkdir()
    assert len(_folders(state)) == 4
    state.close()
    again = _state(tmp_path)
    try:
        assert [a.name for a in again.store.adapters()] == ["assistant", "a"]
        assert _folders(again) == sorted([kept, "999", "notes"])
        assert again.store.create("b", {}).id > int(kept) + 1, "its number is not given out again"
    finally:
        again.close()


def test_unknown_things(store: ServerStore) -> None:
    with pytest.raises(NotFound, match="there is no completion"):
        store.completion("nothing")
    with pytest.raises(NotFound):
        store.feedback("nothing")
    with pytest.raises(NotFound, match="none but 0"):
        store.version(store.create("a", {}), 4)


@given(st.text(max_size=40))
def test_names(name: str) -> None:
    """A name that is taken has no dots beside each other, no slash at an end, nothing but plain characters."""
    try:
        check_name(name)
    except BadRequest:
        return
    assert (
        name.isascii() and ".." not in name and not name.startswith(("/", ".", "-")) and not name.endswith(("/", "."))
    )
    assert name.count("/") <= 1 and not set(name) & set("\\%?#:@ \t\n\0")


def test_another_model_is_refused(store: ServerStore) -> None:
    store.bind("nano", "aaaa")
    store.bind("elsewhere/nano", "aaaa")  # the same weights under another name
    with pytest.raises(EarnestError, match="belong to the model nano"):
        store.bind("other", "bbbb")


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    from earnest.serve.settings import ServeSettings
    from earnest.serve.state import State

    first = State(ServeSettings(data=tmp_path))
    with pytest.raises(ConfigError, match="in use by another server"):
        State(ServeSettings(data=tmp_path))
    first.close()
    State(ServeSettings(data=tmp_path)).close()


def test_nothing_imports_torch() -> None:
    """Accepting feedback needs no torch: the whole application and its schema are made without it."""
    code = (
        "import sys, tempfile; from pathlib import Path; from earnest.serve.app import create_app;"
        "from earnest.serve import ServeSettings; app = create_app(ServeSettings(data=Path(tempfile.mkdtemp())));"
        "app.openapi(); app.state.earnest.close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Queue(RuleBasedStateMachine):
    """Feedback comes, versions are made of some of it, the process is closed and opened: the queue is what a plain
    list would be."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.store = ServerStore(Path(self.folder.name))
        self.row = self.store.create("a", {})
        _given(self.store)
        self.waiting: list[str] = []
        self.applied: list[str] = []
        self.count = 0

    @rule(n=st.integers(1, 4))
    def say(self, n: int) -> None:
        items = [NewFeedback("c1", text="x", id=f"f{self.count + i}") for i in range(n)]
        self.store.add_feedback([(s, self.row) for s in items], "", 1000)
        self.waiting += [s.id for s in items if s.id]
        self.count += n

    @rule(n=st.integers(1, 3), refused=st.booleans())
    def learn(self, n: int, refused: bool) -> None:
        row = self.store.adapter("a")
        taken = self.store.queued(row.id, n)
        if not taken:
            return
        ids = [f.id for f in taken]
        self.store.add_version(
            row.id, row.next, row.live, {"feedback": ids}, [f.seq for f in taken], {}, "bad" * refused
        )
        self.applied += ids
        self.waiting = self.waiting[len(ids) :]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = ServerStore(Path(self.folder.name))

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        assert [f.id for f in self.store.queued(self.row.id, 1000)] == self.waiting
        versions = self.store.versions(self.row.id)
        assert [f for v in versions for f in v.record["feedback"]] == self.applied
        promoted = [v.number for v in versions if v.status == "promoted"]
        assert self.store.adapter("a").live == (promoted[-1] if promoted else 0)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)


def test_a_cancelled_write_is_done_and_the_next_one_too(tmp_path: Path) -> None:
    """A client that leaves must neither take its write back nor take the writer with it."""
    db = Database(tmp_path / "x.sqlite3", "CREATE TABLE t(n INTEGER)")
    gate = threading.Event()
    db.submit(lambda c: gate.wait())
    left = db.submit(lambda c: c.execute("INSERT INTO t VALUES(1)").rowcount)
    assert left.cancel()
    gate.set()
    assert db.write(lambda c: c.execute("INSERT INTO t VALUES(2)").rowcount) == 1
    assert [r["n"] for r in db.read("SELECT n FROM t ORDER BY n")] == [1, 2]
    db.close()


def test_a_write_that_fills_the_disk_fails_alone(tmp_path: Path) -> None:
    """A full disk makes SQLite roll back the whole commit. Its other writes are neither lost nor doubled."""
    db = Database(tmp_path / "db", "CREATE TABLE t(x);")
    release = threading.Event()
    held = db.submit(lambda c: release.wait(60))  # the next three writes share one commit

    def insert(size: int) -> Future[int]:
        return db.submit(lambda c: c.execute("INSERT INTO t VALUES(zeroblob(?))", (size,)).rowcount)

    pages = db.submit(lambda c: c.execute("PRAGMA max_page_count = 8").fetchone()[0])
    small, large, other = insert(10), insert(1 << 20), insert(11)
    release.set()
    assert held.result(60) and pages.result(60) == 8
    assert small.result(60) == other.result(60) == 1
    with pytest.raises(sqlite3.OperationalError, match="full"):
        large.result(60)
    assert [row[0] for row in db.read("SELECT length(x) FROM t ORDER BY 1")] == [10, 11]
    db.close()
