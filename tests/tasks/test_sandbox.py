"""The sandbox: what a tool does to the machine, to other calls and to the run is an observation."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from earnest import plugins
from earnest.tasks.sandbox import PROTECTIONS, Limits, Sandbox, SandboxError, entry_of, protections

pytestmark = pytest.mark.skipif(
    os.name != "posix" or not protections() >= PROTECTIONS, reason="this system cannot isolate a tool"
)
SMALL = Limits(seconds=2.0, memory=128 * 2**20, output=4096)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(SMALL)


def test_code_prints_and_a_function_returns(sandbox: Sandbox) -> None:
    assert sandbox.run("print(6 * 7)").output == "42\n"
    assert sandbox.call("json:dumps", {"obj": [1, 2]}).value == "[1, 2]"
    assert sandbox.call(plugins.absolute, {"entry": "a:b"}).value == "a:b"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os\nwhile True:\n    os.fork()", "PermissionError"),
        ("import threading\nwhile True:\n    threading.Thread(target=input).start()", "can't start new thread"),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
        ("x = bytearray(10 * 2**30)", "more memory than it may have"),
        ("x = []\nwhile True:\n    x.append(' ' * 2**20)", "more memory than it may have"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)", "PermissionError"),
        ("import socket\nsocket.socket(socket.AF_UNIX)", "PermissionError"),
        ("import sys\nfor _ in range(100):\n    sys.stdout.write('x' * 2**20)", "printed more than 4096 bytes"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import os\nos.chmod('/tmp', 0o1777)", "PermissionError"),
        ("import ctypes\nctypes.string_at(0)", "the signal SIGSEGV"),
        ("import os\nos._exit(0)", "without a result"),
        ("import os\nos.write(3, b'[' * 4000)\nos._exit(0)", "something else in place of its result"),
        ("import os\nos.write(3, b'[1]')\nos._exit(0)", "something else in place of its result"),
        ("import sys\nsys.exit(3)", "exit(3)"),
        ("def f(:", "SyntaxError"),
        ("a = 1\n1 / 0", "ZeroDivisionError: division by zero (line 2)"),
    ],
)
def test_every_attack_is_an_observation(sandbox: Sandbox, code: str, error: str) -> None:
    assert error in sandbox.run(code).error
    assert sandbox.run("print('still here')").output == "still here\n"


def test_an_infinite_loop_ends_at_its_limit(sandbox: Sandbox) -> None:
    assert sandbox.run("while True: pass", Limits(seconds=0.2)).error == "it took longer than 0.2 seconds"


@pytest.mark.parametrize("how", ["absolute", "relative", "symlink", "append", "delete", "rename"])
def test_no_path_leads_out_of_the_scratch_folder(sandbox: Sandbox, tmp_path: Path, how: str) -> None:
    target = tmp_path / "kept.txt"
    target.write_text("before")
    path, folder = repr(str(target)), repr(str(tmp_path))
    code = {
        "absolute": f"open({path}, 'w').write('x')",
        "relative": f"import os\nopen(os.path.relpath({path}), 'w').write('x')",
        "symlink": f"import os\nos.symlink({folder}, 'link')\nopen('link/kept.txt', 'w').write('x')",
        "append": f"open({path}, 'a').write('x')",
        "delete": f"import os\nos.remove({path})",
        "rename": f"import os\nopen('mine', 'w').write('x')\nos.rename('mine', {path})",
    }[how]
    assert "Error" in sandbox.run(code).error
    assert target.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["kept.txt"]


def test_files_of_the_user_cannot_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "answers.txt"
    secret.write_text("42")
    assert "PermissionError" in sandbox.run(f"print(open({str(secret)!r}).read())").error


def test_secrets_of_the_environment_are_not_given(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in sandbox.run("import os\nprint(dict(os.environ))").output


def test_the_scratch_folder_is_writable_and_new_for_every_call(sandbox: Sandbox) -> None:
    assert sandbox.run("open('a', 'w').write('hi')\nprint(open('a').read())").output == "hi\n"
    assert sandbox.run("import os\nprint(os.listdir('.'))").output == "[]\n"


def test_no_call_sees_what_another_one_left_behind(sandbox: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "my_tool.py"
    file.write_text("count = 0\ndef tool() -> int:\n    global count\n    count += 1\n    return count\n")
    entry = f"{file}:tool"
    assert [sandbox.call(entry, {}).value for _ in range(3)] == [1, 1, 1]


def workers() -> dict[str, int]:
    """The processes of this one that run sandboxed code, each with its number of open files."""
    children = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    found = [pid for pid in children if b"sandbox_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in found}


def test_a_call_leaves_no_file_open(sandbox: Sandbox) -> None:
    sandbox.run("1")
    before = workers()
    sandbox.run("1")
    sandbox.run("1 / 0")
    assert before and workers() == before


def test_calls_from_many_threads(sandbox: Sandbox) -> None:
    found: dict[int, str] = {}

    def work(i: int) -> None:
        found[i] = sandbox.run(f"print({i})").output

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"{i}\n" for i in range(8)}


def test_a_function_that_no_process_can_import_is_refused() -> None:
    with pytest.raises(SandboxError, match="top level of a module"):
        entry_of(lambda: None)


def test_a_module_that_cannot_be_imported_raises(sandbox: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("print('noise on the replies')\n1 / 0\n")
    with pytest.raises(SandboxError, match="cannot be imported in the sandbox: ZeroDivisionError"):
        sandbox.call(f"{file}:tool", {})


def test_limits_of_zero_are_refused() -> None:
    with pytest.raises(SandboxError, match="seconds=0"):
        Limits(seconds=0)
