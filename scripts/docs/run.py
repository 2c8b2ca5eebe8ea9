"""Run every block of a page, from top to bottom, as a reader would.

    python -m scripts.docs.run README.md

Blocks of Python share one interpreter and its names; shell blocks run between them, all in one temporary folder in
which the repository's own files are linked, so nothing is written into the repository. A plain `earnest …` command,
also after `echo "…" |`, runs in a process forked from one that has already imported torch, which saves five seconds.
"""

from __future__ import annotations

import doctest
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path

from scripts.docs.check import DATA, PYTHON, SHELL, applies, problems, split_with
from scripts.docs.pages import ROOT, Block, Command, Page, commands, read

LINKED = (
    "src",
    "earnest-audit",
    "docs",
    "benchmarks",
    "scripts",
    "tests",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    ".ci",
)
PRELOAD = ["torch", "transformers.models.llama.modeling_llama", "earnest.cli"]
FORKS = multiprocessing.get_context("forkserver")
# A time limit for blocks that hang; normal blocks are far below it.
LIMIT_SECONDS = 600


class BlockFailed(Exception):
    def __init__(self, page: Page, line: int, what: str, output: str = "") -> None:
        tail = "\n".join(output.rstrip().splitlines()[-40:])
        super().__init__(f"{page.where(line)}: {what}" + (f"\n{tail}" if tail else ""))


def run_page(page: Page, folder: Path) -> None:
    """Raise BlockFailed at the first block that does not do what the page says."""
    names = _fresh_names()
    for block in page.blocks:
        if block.one("run-by") is not None:
            continue
        started = time.monotonic()
        if (name := block.one("file")) is not None:
            (folder / name).write_text(block.text)
        elif block.language in PYTHON:
            if block.one("fresh") is not None:
                names = _fresh_names()
            _run_python(page, block, names)
        elif block.language in SHELL:
            _run_shell(page, block, folder)
        elif block.language not in (*DATA, "text"):
            raise BlockFailed(page, block.line, f"nothing knows how to run {block.language!r}")
        print(f"{page.where(block.line)}: {block.language} ok, {time.monotonic() - started:.1f} s", flush=True)


def _fresh_names() -> dict[str, object]:
    """The names of a module that can be found, as dataclasses and pickles demand."""
    sys.modules["docs_block"] = module = types.ModuleType("docs_block")
    return module.__dict__


def _run_python(page: Page, block: Block, names: dict[str, object]) -> None:
    # Blank lines above, so that a traceback shows the page's own line numbers.
    code = compile("\n" * (block.line - 1) + block.text, str(page.path), "exec")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"(earnest|docs_block)($|\.)")
        try:
            exec(code, names)
        except BaseException as error:
            raise BlockFailed(page, block.line, "the block raised", traceback.format_exc()) from error


def _run_shell(page: Page, block: Block, folder: Path) -> None:
    expected = int(block.one("exit") or 0)
    planned = [reduced(block, command) for command in commands(block)]
    if block.language == "console" or all(_plain_earnest(c.text) for c in planned):
        for command in planned:
            plain = _plain_earnest(command.text)
            code, output = _run_bash(command.text, folder) if plain is None else run_earnest(plain[0], folder, plain[1])
            if code != expected:
                raise BlockFailed(page, command.line, f"`{command.text}` ended with {code}, not {expected}", output)
            if command.shown is not None and command.shown.strip():
                _compare(page, command, output)
        return
    script = "\n".join(command.text for command in planned)
    code, output = _run_bash(script, folder)
    if code != expected:
        raise BlockFailed(page, block.line, f"the block ended with {code}, not {expected}", output)


def reduced(block: Block, command: Command) -> Command:
    """The command with the words that make it small (``<!-- test: with … -->``)."""
    more = [split_with(words)[0] for words in block.all("with") if applies(words, command.text)]
    return Command(command.line, " ".join([command.text, *more]), command.shown)


def _plain_earnest(text: str) -> tuple[list[str], str] | None:
    """(words, standard input) of `earnest …` and of `echo "…" | earnest …`; None for what only a shell can run."""
    given = ""
    if piped := re.fullmatch(r'echo "([^"$`\\]*)" \| (.*)', text):
        given, text = f"{piped[1]}\n", piped[2]
    if text.split()[0] != "earnest" or any(char in text for char in "|&;<>$`*?\n"):
        return None
    return shlex.split(text), given


def run_earnest(argv: list[str], folder: Path, given: str = "") -> tuple[int, str]:
    """(exit code, output) of an `earnest` command in a fork of a process that has imported torch. It runs in the folder
    and reads ``given`` as its standard input."""
    with tempfile.NamedTemporaryFile("w+", errors="replace") as out, tempfile.NamedTemporaryFile("w+") as source:
        source.write(given)
        source.flush()
        child = FORKS.Process(target=_earnest_in_child, args=(argv, str(folder), out.name, source.name))
        child.start()
        child.join(LIMIT_SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
        return child.exitcode if child.exitcode is not None else -1, out.read()


def _earnest_in_child(argv: list[str], folder: str, out: str, source: str) -> None:
    os.dup2(os.open(source, os.O_RDONLY), 0)
    file = os.open(out, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.argv = argv
    from earnest.cli import main

    main()


def _run_bash(script: str, folder: Path) -> tuple[int, str]:
    full = f"set -euo pipefail\ntrap 'echo \"failed at: $BASH_COMMAND\" >&2' ERR\n{script}\n"
    try:
        done = subprocess.run(
            ["bash", "-c", full],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return -1, f"{error}\n{error.output or ''}"
    return done.returncode, done.stdout


def _compare(page: Page, command: Command, output: str) -> None:
    """Shown output holds as in a doctest: `...` stands for anything, white space does not matter."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    shown = (command.shown or "").strip() + "\n"
    if not doctest.OutputChecker().check_output(shown, output.strip() + "\n", flags):
        raise BlockFailed(page, command.line, f"`{command.text}` printed something else than the page shows", output)


def prepare(folder: Path) -> None:
    """The folder looks like the repository's root; what is written into it stays in it."""
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    os.environ |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
    }
    FORKS.set_forkserver_preload(PRELOAD)


def main(argv: list[str]) -> int:
    pages = [read(Path(name).resolve()) for name in argv]
    for page in pages:
        bad = problems(page)
        if bad:
            print("\n".join(bad), file=sys.stderr)
            return 1
        with tempfile.TemporaryDirectory(prefix="earnest-docs-") as folder:
            try:
                prepare(Path(folder))
                run_page(page, Path(folder))
            except BlockFailed as failure:
                print(failure, file=sys.stderr)
                return 1
            finally:
                os.chdir(ROOT)
    return 0


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    raise SystemExit(main(sys.argv[1:]))
