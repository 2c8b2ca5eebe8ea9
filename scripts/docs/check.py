"""Checks of a page without running it. `problems(page)` lists sentences with file and line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from scripts.docs.pages import ROOT, VERBS, Block, Page, Table, commands, read

SHELL = ("bash", "sh", "console")
PYTHON = ("python",)
# Not run, but read by the parser of their language; `text` is for what is no language at all (output, trees, synopses).
DATA: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "jsonl": lambda t: [json.loads(x) for x in t.splitlines()],
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
}
WIDEST = 400
LANGUAGES = (*SHELL, *PYTHON, *DATA, "text")
# Metacharacters after which an appended word would reach another command than the one that is meant.
_META = re.compile(r"[|&;<>]")
_NUMBER = re.compile(
    r"^[~<>≤≥≈±+−-]?\s*\d[\d.,]*(\s*(±|→|–|-|\.\.)\s*[+−-]?\d[\d.,]*)*\s*(%|×|x|s|ms|MB|GB|kB|steps/s|tokens/s)?$"
)
_REPO_PATH = re.compile(r"^(src|tests|docs|benchmarks|scripts)/[\w./-]+$")
_EXTRA = re.compile(r"\bearnest\[([\w,\- ]+)\]")


def problems(page: Page) -> list[str]:
    history = page.path.is_relative_to(ROOT / "docs" / "adr") or page.path.name == "CHANGELOG.md"
    found = [*_directives(page), *_blocks(page), *_tables(page), *_links(page), *_extras(page)]
    return found if history else [*found, *_inline(page)]


def _directives(page: Page) -> Iterator[str]:
    for d in page.dangling:
        yield f"{page.where(d.line)}: `test: {d.verb}` has no code block right below it"
    for block in page.blocks:
        for d in block.directives:
            if d.verb not in VERBS:
                yield f"{page.where(d.line)}: unknown `test: {d.verb}`; there are: {', '.join(VERBS)}"


def _blocks(page: Page) -> Iterator[str]:
    for block in page.blocks:
        here = page.where(block.line)
        if not block.fenced:
            yield f"{here}: an indented code block, which nothing runs; put it in a fence with a language"
        elif block.language not in LANGUAGES:
            yield f"{here}: language {block.language or '(none)'!r} cannot be run; there are: {', '.join(LANGUAGES)}"
        elif block.language in DATA:
            try:
                DATA[block.language](block.text)
            except Exception as error:
                yield f"{here}: not {block.language}: {error}"
        elif block.language == "text" and re.search(r"^\$ ", block.text, re.MULTILINE):
            yield f"{here}: a command in a `text` block, which nothing runs; call the block `console`"
        elif block.language in SHELL:
            yield from _shell(page, block)
        target = block.one("run-by")
        if target is not None:
            yield from _run_by(page, block, target)


def _shell(page: Page, block: Block) -> Iterator[str]:
    found = list(commands(block))
    if not found:
        yield f"{page.where(block.line)}: no command in this {block.language} block (`console`: they stand after `$ `)"
    for words in block.all("with"):
        if not any(applies(words, c.text) for c in found):
            yield f"{page.where(block.line)}: `test: with {words}` applies to no command of the block"
    for command in found:
        if any(applies(w, command.text) for w in block.all("with")) and _META.search(command.text):
            yield f"{page.where(command.line)}: `test: with` cannot append to a line with pipes or redirections"


def split_with(words: str) -> tuple[str, str]:
    """`with ARGS to PREFIX` → (ARGS, PREFIX); the prefix is empty where it is left out."""
    args, _, prefix = words.partition(" to ")
    return args.strip(), prefix.strip()


def applies(words: str, command: str) -> bool:
    """Whether these words belong to this command: `to earnest run` does not mean `earnest runs`."""
    prefix = split_with(words)[1].split()
    return command.split()[: len(prefix)] == prefix


def _run_by(page: Page, block: Block, target: str) -> Iterator[str]:
    file = ROOT / target
    if not file.is_file():
        yield f"{page.where(block.line)}: `test: run-by {target}`: no such file"
        return
    text = " ".join(file.read_text(encoding="utf-8").split())
    for command in commands(block):
        if " ".join(command.text.split()) not in text:
            yield f"{page.where(command.line)}: {target} is said to run `{command.text}`, but does not contain it"


def holds_results(table: Table) -> bool:
    """A column that is mostly numbers makes a table of results."""
    columns = list(zip(*table.rows, strict=False))
    return any(2 * sum(bool(_NUMBER.match(cell.strip("* `"))) for cell in column) > len(column) for column in columns)


def _tables(page: Page) -> Iterator[str]:
    for table in page.tables:
        here = page.where(table.first)
        for number, row in enumerate(table.rows, table.first + 2):
            if sum(map(len, row)) >= WIDEST:
                yield f"{page.where(number)}: a row of a table with {WIDEST} characters or more; split it"
        if table.command is None:
            if holds_results(table) and not table.by_hand:
                yield (
                    f"{here}: a table of numbers without its command; write under it: generated by: `command` "
                    "(or above it, if no command could: <!-- table: by hand, because … -->)"
                )
            continue
        missing = [w for w in table.command.split() if w.endswith(".py") and not (ROOT / w).is_file()]
        if missing:
            yield f"{here}: generated by a file that does not exist: {missing[0]}"


def _links(page: Page) -> Iterator[str]:
    for line, href in page.links:
        if re.match(r"[a-z]+:", href):
            continue
        name, _, anchor = href.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        if target.is_relative_to(ROOT / "docs/reference"):
            continue  # made by scripts/docs/site.py; the strict build of the site checks these links
        if not target.exists():
            yield f"{page.where(line)}: the link to {href} leads nowhere"
        elif (
            anchor and target.suffix == ".md" and anchor not in (page if target == page.path else read(target)).anchors
        ):
            yield f"{page.where(line)}: {name or 'this page'} has no heading #{anchor}"


def _extras(page: Page) -> Iterator[str]:
    known = extras()
    for number, line in enumerate(page.path.read_text(encoding="utf-8").splitlines(), 1):
        for match in _EXTRA.finditer(line):
            for extra in re.split(r"[,\s]+", match.group(1)):
                if extra not in known:
                    yield f"{page.where(number)}: there is no extra {extra!r}; there are: {', '.join(sorted(known))}"


def _inline(page: Page) -> Iterator[str]:
    """Commands and paths that a sentence mentions exist."""
    for line, code in page.inline_code:
        for tool, known in (("earnest", cli_commands), ("make", make_targets)):
            said = re.match(rf"{tool} ([a-z][a-z-]*)\b", code)
            if said and said.group(1) not in known():
                there = ", ".join(sorted(known()))
                yield f"{page.where(line)}: there is no `{tool} {said.group(1)}`; there are: {there}"
        if _REPO_PATH.match(code) and not (ROOT / code).exists():
            yield f"{page.where(line)}: there is no {code}"


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def cli_commands() -> set[str]:
    import typer.main

    from earnest.cli import app

    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def check(path: Path) -> list[str]:
    return problems(read(path))
