"""The notebooks are the tutorials, and run from top to bottom in a kernel."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.manager import KernelManager

from scripts.docs.notebooks import FOLDER, TUTORIALS, notebook, place, written
from scripts.docs.run import FORKS, PRELOAD, run_earnest

EARNEST = """#!{python} -SE
# `earnest` in the tests of the notebooks: the command runs in a fork of a process that has imported torch.
import os, sys
from multiprocessing.connection import Client
with Client({address!r}) as server:
    # %%bash gives its own lines to its commands as their standard input; only a conversation reads it
    server.send((sys.argv, os.getcwd(), sys.stdin.read() if "chat" in sys.argv else ""))
    code, output = server.recv()
sys.stdout.write(output)
sys.exit(code)
"""


def test_the_files_are_up_to_date() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(TUTORIALS)
    for name in TUTORIALS:
        assert place(name).read_text() == written(name), "run `python -m scripts.docs.notebooks`"
        nbformat.validate(nbformat.read(place(name), as_version=4))


def _answer(listener: Listener) -> None:
    """Run the command of each connection, until a connection sends none."""
    while True:
        with listener.accept() as client:
            asked = client.recv()
            if asked is None:
                return
            argv, folder, given = asked
            client.send(run_earnest(["earnest", *argv[1:]], Path(folder), given))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One kernel for all notebooks, whose `earnest` starts in a tenth of the time."""
    tools, place = tmp_path_factory.mktemp("tools"), tmp_path_factory.mktemp("ipython")
    FORKS.set_forkserver_preload(PRELOAD)
    with Listener(family="AF_UNIX") as listener, pytest.MonkeyPatch.context() as patch:
        script = tools / "earnest"
        script.write_text(EARNEST.format(python=sys.executable, address=listener.address))
        script.chmod(0o755)
        server = threading.Thread(target=_answer, args=(listener,))
        server.start()
        patch.setenv("PATH", os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]))
        patch.setenv("IPYTHONDIR", str(place))
        patch.setenv("COLUMNS", "120")
        manager = KernelManager()
        manager.start_kernel()
        yield manager
        manager.shutdown_kernel(now=True)
        from multiprocessing.connection import Client

        with Client(listener.address) as client:
            client.send(None)
        server.join()


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_notebook_runs(name: str, kernel: KernelManager, tmp_path: Path) -> None:
    made = nbformat.reads(json.dumps(notebook(name, small=True)), as_version=4)
    made.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}"))
    client = nbclient.NotebookClient(made, km=kernel, timeout=600)
    client.execute()
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code) and len(code) > 4
    assert any(tmp_path.iterdir())
