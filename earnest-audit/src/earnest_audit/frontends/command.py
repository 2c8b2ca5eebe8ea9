"""The command ``earnest-audit``: run a training script under the audit, or list the laws.

    earnest-audit [OPTIONS] train.py [ARGUMENTS of the script]
    earnest-audit laws [CODE ...]

The options may come before or after the script. Before it, an unknown option is refused; all other arguments after the
script are passed to it, and so is everything after `--`.

Exit codes: 0 no law is broken (rows may warn) · 1 a law is broken, with --strict also where a row warns, or nothing was
checked · 2 the command is wrong, nothing in the script trained, or it raised or ended with an error before a law was
broken · 130 Ctrl-C. What was checked until then is reported in each case, with a failing row for what went wrong.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from earnest_audit.errors import EarnestError, nearest
from earnest_audit.frontends.reports import FORMATS, INTERRUPTED, UNFINISHED
from earnest_audit.frontends.terminal import show
from earnest_audit.verdict import Verdict
from earnest_audit.version import __version__


def main(words: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (by default those of the process), and return its exit code."""
    given = list(sys.argv[1:] if words is None else words)
    parser = make_parser()
    own, rest = _split(parser, given)
    options = parser.parse_args(own)
    for word in given[: given.index("--")] if "--" in given else given:  # what follows the script may be the script's
        close = difflib.get_close_matches(word.split("=", 1)[0], parser._option_string_actions, n=1, cutoff=0.8)
        if word in rest[1:] and word.startswith("--") and close:
            print(f"earnest-audit: {word} is passed to the script; did you mean {close[0]}?", file=sys.stderr)
    try:
        if not rest:
            parser.error("give a training script (.py), or `laws`.")
        if rest[0] == "laws":
            print(_laws(rest[1:], options.json), flush=True)
            return 0
        files = {name: getattr(options, name) for name in FORMATS}
        begin_reports(files, Path(rest[0]))
        from earnest_audit.frontends.script import audit_script  # imports torch

        verdict = audit_script(Path(rest[0]), rest[1:], quick=options.quick, strict=options.strict)
        return report(verdict, as_json=options.json, files=files)
    except EarnestError as error:
        print(f"earnest-audit: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # the second one
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="earnest-audit", usage="earnest-audit [OPTIONS] train.py [ARGUMENTS] | earnest-audit laws [CODE ...]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--quick", action="store_true", help="check the cheap laws only")
    parser.add_argument("--strict", action="store_true", help="warnings are failures")
    for name, (what, _) in FORMATS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write the verdict as {what}")
    parser.add_argument("--version", action="version", version=f"earnest-audit {__version__}")
    return parser


def _split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the command's own options from the script and its arguments, in their order."""
    takes = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    own: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name = word.split("=", 1)[0]
        if word == "--":
            rest += left
        elif name in takes or (not rest and word.startswith("-")):
            own.append(word)
            if takes.get(name) and name == word:
                own += [value for value in [next(left, None)] if value is not None]
        else:
            rest.append(word)
    return own, rest


def begin_reports(files: dict[str, Path | None], script: Path | None = None) -> None:
    """Write each report as that of a run that did not end, so that no older one survives a run that is killed. Raise if
    one cannot be written, before the work begins. Folders are created below the current folder only."""
    for name, path in files.items():
        if path is None:
            continue
        place = path.resolve()
        known = place.parent.is_dir() or place.is_relative_to(Path.cwd())
        try:
            if not known or (script is not None and place == script.resolve()):
                raise OSError
            _write(name, path, Verdict((UNFINISHED,)))
        except OSError as error:
            raise EarnestError(
                f"--{name}: {path} cannot be written; give the path of a file in a folder that exists and is yours."
            ) from error


def _write(name: str, path: Path, verdict: Verdict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FORMATS[name][1](verdict), encoding="utf-8")


def report(verdict: Verdict, *, as_json: bool, files: dict[str, Path | None]) -> int:
    """Print the verdict, write its files, and return the exit code."""
    for name, path in files.items():
        if path is not None:
            try:
                _write(name, path, verdict)
            except OSError as error:
                print(f"earnest-audit: --{name}: {path} was not written ({error.strerror}).", file=sys.stderr)
    if as_json:
        print(json.dumps(verdict.to_dict(), indent=1))
    else:
        show(verdict)
    sys.stdout.flush()
    if any(f.measured == INTERRUPTED for f in verdict.failures):
        return 130
    return 0 if verdict.holds else 2 if {f.law for f in verdict.failures} == {"AUDIT"} else 1


def _laws(codes: Sequence[str], as_json: bool) -> str:
    """A table of all laws, or the pages of the laws with these codes."""
    from earnest_audit.frontends.pages import ALL, page

    known = {law.code: law for law in ALL}
    for code in codes:
        if code.upper() not in known:
            raise EarnestError(f"there is no law {code!r}: {nearest(code, known)}")
    chosen = [known[code.upper()] for code in codes] or list(ALL)
    if as_json:
        rows = [{"code": law.code, "name": law.name, "tier": law.tier, "sentence": law.sentence} for law in chosen]
        return json.dumps(rows, indent=1, ensure_ascii=False)
    if codes:
        return "\n\n".join(page(law) for law in chosen)
    width = max(len(law.code) for law in chosen)
    return "\n".join(f"{law.code:<{width}}  {law.tier:<7}  {law.sentence}" for law in chosen)
