"""The command ``earnest-audit``: its words, its exit codes, and the verdict as JSON, JUnit, SARIF and Markdown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from earnest_audit import Finding, LawBroken, Verdict
from earnest_audit.frontends.command import main, make_parser
from earnest_audit.frontends.reports import junit, markdown, sarif
from tests.audit.test_script import STEP, script

HOLDS = Finding("GL", "4 trainable parameters", "4 got a gradient", "all", "holds")
FAILS = Finding("MI", "padding <|pad|> & more", "2e-3\x1b", "≤ 1e-6", "fails", "More padding | changes it.", "a b.py:7")
SKIPPED = Finding("KG", "settings", "not checked", "-", "not declared", "Declare settings and it is checked.")
UNCHECKED = Finding("SE", "splits", "could not be checked (ValueError: x)", "-", "not applicable", "It raised.")

# The parts of the SARIF 2.1.0 schema that are used here, with the properties that GitHub requires.
TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
SARIF = {
    "type": "object",
    "required": ["$schema", "version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "minItems": 1, "items": {
            "type": "object",
            "required": ["tool", "results"],
            "additionalProperties": False,
            "properties": {
                "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                "tool": {"type": "object", "required": ["driver"], "properties": {"driver": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"rules": {"type": "array", "uniqueItems": True, "items": {
                        "type": "object",
                        "required": ["id"],
                        "properties": {"id": {"type": "string"}, "shortDescription": TEXT, "help": TEXT},
                    }}},
                }}},
                "results": {"type": "array", "items": {
                    "type": "object",
                    "required": ["message", "ruleId", "level", "locations"],
                    "properties": {
                        "message": TEXT,
                        "level": {"enum": ["none", "note", "warning", "error"]},
                        "locations": {"type": "array", "items": {
                            "type": "object",
                            "required": ["physicalLocation"],
                            "properties": {"physicalLocation": {
                                "type": "object",
                                "required": ["artifactLocation", "region"],
                                "properties": {"region": {
                                    "type": "object",
                                    "required": ["startLine"],
                                    "properties": {"startLine": {"type": "integer", "minimum": 1}},
                                }},
                            }},
                        }},
                    },
                }},
            },
        }},
    },
}  # fmt: skip


def test_junit_has_a_case_for_each_row_and_counts_that_agree() -> None:
    """As the schema of JUnit has it: counts, and in each case at most one failure or skipped element."""
    root = ElementTree.fromstring(junit(Verdict((HOLDS, FAILS, SKIPPED, UNCHECKED))))
    (suite,) = root
    cases = list(suite)
    assert root.tag == "testsuites" and {case.tag for case in cases} == {"testcase"}
    kinds = [[child.tag for child in case] for case in cases]
    assert kinds == [[], ["failure"], ["skipped"], ["skipped"]]
    for name, count in (("tests", 4), ("failures", 1), ("errors", 0), ("skipped", 2)):
        assert int(suite.attrib[name]) == int(root.attrib[name]) == count
    assert all(set(case.keys()) >= {"name", "classname", "time"} for case in cases)
    failure = cases[1][0]
    assert failure.attrib["type"] == "MI" and "2e-3\ufffd" in failure.attrib["message"]
    assert "a b.py:7" in str(failure.text)


def test_junit_names_rows_of_several_audits_apart() -> None:
    """A reader of JUnit keeps one case per class and name; the others would be lost."""
    other = replace(FAILS, place="b.py:3")
    root = ElementTree.fromstring(junit(Verdict((HOLDS, FAILS, other, other))))
    names = [case.attrib["name"] for case in root[0]]
    assert names[0] == HOLDS.subject and len(set(names)) == 4
    assert names[1:] == [f"{FAILS.subject} ({more}" for more in ("a b.py:7)", "b.py:3) #1", "b.py:3) #2")]


def test_sarif_has_the_law_the_file_and_the_line() -> None:
    found = json.loads(sarif(Verdict((HOLDS, FAILS, SKIPPED, UNCHECKED)).at("train.py:1")))
    jsonschema.validate(found, SARIF)
    (run,) = found["runs"]
    assert [(r["ruleId"], r["level"]) for r in run["results"]] == [("MI", "error"), ("SE", "warning")]
    rules = run["tool"]["driver"]["rules"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] and rules[result["ruleIndex"]]["help"]["markdown"]
    where = run["results"][0]["locations"][0]["physicalLocation"]
    assert where["artifactLocation"] == {"uri": "a%20b.py", "uriBaseId": "%SRCROOT%"}
    assert where["region"]["startLine"] == 7


def test_markdown_shows_failures_first_and_escapes_its_cells() -> None:
    text = markdown(Verdict((HOLDS, FAILS, SKIPPED)))
    assert text.startswith("## ❌") and "1 check holds, 1 law broken." in text
    assert "- **MI** on padding \\<\\|pad\\|\\> \\& more (`a b.py:7`)" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 5 and len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_markdown_takes_no_markup_from_paths_and_messages() -> None:
    row = replace(FAILS, place="a`\n\n# b.py:7", meaning="see ![it](http://host/x) & [more](y)")
    text = markdown(Verdict((row,)))
    assert "(`a # b.py:7`)" in text and "see \\!\\[it\\](http://host/x) \\& \\[more\\](y)" in text


@pytest.mark.parametrize("verdict", [Verdict(()), Verdict((SKIPPED,))])
def test_a_verdict_in_which_nothing_was_checked_is_a_failure_in_every_format(verdict: Verdict) -> None:
    assert ElementTree.fromstring(junit(verdict)).attrib["failures"] == "1"
    assert [r["level"] for r in json.loads(sarif(verdict))["runs"][0]["results"]] == ["error"]
    assert markdown(verdict).startswith("## ❌")


def test_the_plain_table_has_every_row_and_every_meaning() -> None:
    text = str(Verdict((HOLDS, FAILS, SKIPPED), notes=("dropout was off",)))
    lines = text.splitlines()
    assert lines[1].split() == ["law", "subject", "measured", "expected", "verdict"] and set(lines[2]) == {"-", " "}
    meaning = "✗ MI on padding <|pad|> & more: More padding | changes it. (a b.py:7)"
    assert "· dropout was off" in lines and meaning in lines, "what it means, and where"
    assert max(map(len, lines)) <= 120


def test_one_process_judges_a_script_and_writes_every_format(tmp_path: Path) -> None:
    """A broken step: exit 1, and each file names the law and the line of the loss in the script."""
    text = STEP.format(step="sft_step", loss="sft_loss", value="loss * 0.0")
    path = script(tmp_path, f"import os; os.system('echo a child process')\n{text}")
    words = f"--junit r/j.xml {path.name} --sarif r/s.sarif --lr 3 --markdown=r/m.md --json -- --quick".split()
    done = subprocess.run(
        [sys.executable, "-m", "earnest_audit", *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert (
        "a child process" in done.stderr
        and "hello from ['--lr', '3', '--quick']" in done.stderr
        and not json.loads(done.stdout)["holds"]
    )
    line = path.read_text().splitlines().index("def wrong(model, batch, *args, **settings):") + 1
    assert {f["place"] for f in json.loads(done.stdout)["findings"]} == {f"train.py:{line}"}
    found = json.loads((tmp_path / "r/s.sarif").read_text())
    jsonschema.validate(found, SARIF)
    (place,) = {json.dumps(r["locations"]) for r in found["runs"][0]["results"]}
    assert '"train.py"' in place and f'"startLine": {line}' in place
    assert ElementTree.parse(tmp_path / "r/j.xml").getroot().attrib["failures"] != "0"
    assert f"(`train.py:{line}`)" in (tmp_path / "r/m.md").read_text()


def test_a_process_without_stdout_runs_the_script(tmp_path: Path) -> None:
    path = script(tmp_path, STEP.format(step="sft_step", loss="sft_loss", value="loss"))
    command = f"{sys.executable} -m earnest_audit --markdown m.md {path.name} >&-"
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=False, stderr=subprocess.DEVNULL, env=env)
    assert "AttributeError" not in (text := (tmp_path / "m.md").read_text()) and text.startswith("## ✅"), text


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        ("import torch\nraise TypeError('no')", 2, "train.py raised TypeError: no."),
        ("import sys; sys.exit(3)", 2, "ended with 3"),
        ("from tests.audit.test_command import broken; broken().raise_if_failed()", 1, ""),
        ("import sys; from tests.audit.test_command import broken; sys.exit(int(not broken().holds))", 1, ""),
        (
            "from tests.audit.test_command import broken; broken(); raise OSError('upload')",
            1,
            "raised OSError: upload.",
        ),
        (
            "from tests.audit.test_command import right; right(); raise OSError('upload')",
            2,
            "raised OSError: upload.",
        ),
    ],
)
def test_the_exit_code_tells_a_broken_law_from_a_broken_script(
    text: str, code: int, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(script(tmp_path, text))]) == code
    assert sentence in capsys.readouterr().err


def broken() -> Verdict:
    from earnest_audit import Census, audit

    return audit(Census(wanted=["a"], found=[]))


def right() -> Verdict:
    from earnest_audit import Census, audit

    return audit(Census(wanted=["a"], found=["a"]))


LOOP = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(3, 2)).pow(2).mean().backward()
    optimizer.step()
"""


def test_a_watched_loop_is_not_called_an_audited_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note, title = "The loss itself was not audited", "watched only: the loss itself was not audited"
    files = [tmp_path / "verdict.md", tmp_path / "verdict.xml"]
    assert main([str(script(tmp_path, LOOP)), "--json", "--markdown", str(files[0]), "--junit", str(files[1])]) == 0
    out = capsys.readouterr().out
    assert note in out and title in json.loads(out)["title"]
    assert title in files[0].read_text(encoding="utf-8").splitlines()[0]
    skipped = ElementTree.parse(files[1]).findall(".//testcase[@name='the loss']/skipped")
    assert [note in case.attrib["message"] for case in skipped] == [True]
    assert main([str(script(tmp_path, LOOP))]) == 0
    assert title in " ".join(capsys.readouterr().out.split("┏")[0].split())
    assert main([str(script(tmp_path, "from tests.audit.test_command import right; right()")), "--json"]) == 0
    assert note not in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_refused_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = script(tmp_path, "raise SystemExit(9)")
    far = tmp_path / "none" / "report.xml"
    for path in (tmp_path, place / "report.xml", Path("/proc/x/report.xml"), far, place):
        assert main([str(place), "--junit", str(path)]) == 2 and not far.parent.exists()
        assert f"--junit: {path} cannot be written" in capsys.readouterr().err


def test_a_report_that_could_not_be_written_costs_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script itself puts a file where the report's folder has to be."""
    folder = tmp_path / "r"
    spoil = f"import shutil; shutil.rmtree({str(folder)!r}); open({str(folder)!r}, 'w').close()\n"
    for test, code in (("right", 0), ("broken", 1)):
        folder.mkdir()
        path = script(tmp_path, spoil + f"from tests.audit.test_command import {test}; {test}()")
        assert main([str(path), "--sarif", str(tmp_path / "r/s.sarif"), "--json"]) == code
        out, err = capsys.readouterr()
        assert json.loads(out)["holds"] == (code == 0)
        assert "--sarif: " in err and "s.sarif was not written (" in err and "Traceback" not in err
        (tmp_path / "r").unlink()


def test_ctrl_c_reports_what_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = script(tmp_path, LOOP + "raise KeyboardInterrupt\n"), tmp_path / "verdict.md"
    assert main([str(path), "--json", "--markdown", str(file)]) == 130
    found = json.loads(capsys.readouterr().out)
    assert "was interrupted" in found["title"] and found["counts"]["holds"] >= 4
    assert file.read_text(encoding="utf-8").startswith("## ❌ the training script was interrupted: what was")
    assert main([str(script(tmp_path, "raise KeyboardInterrupt"))]) == 130


def test_the_laws_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laws"]) == 0
    assert re.search(r"^PG-CLIP +core +Clipping may zero", capsys.readouterr().out, re.MULTILINE)
    assert main(["laws", "MI"]) == 0
    assert capsys.readouterr().out.startswith("## MI: masks")
    assert main(["laws", "mi"]) == 0
    assert capsys.readouterr().out.startswith("## MI: masks")
    assert main(["laws", "--json"]) == 0
    assert {"MI", "GL"} <= {row["code"] for row in json.loads(capsys.readouterr().out)}
    assert main(["laws", "MY"]) == 2
    assert "there is no law 'MY': did you mean 'M" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["laws"], ["laws", "MI"], ["laws", "--json"]])
def test_a_reader_that_ends_early_gets_no_traceback(words: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)  # as `head` does
    command = [sys.executable, "-m", "earnest_audit", *words]
    ended = subprocess.run(command, check=False, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert ended.returncode == 1 and not ended.stderr


def test_the_help_shows_that_an_option_takes_a_file() -> None:
    assert all(f"--{name} FILE" in make_parser().format_help() for name in ("junit", "sarif", "markdown"))


def test_a_misspelt_option_after_the_script_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be an option of the script, so the script gets it."""
    path = script(tmp_path, "import sys; from tests.audit.test_command import right; right(); print(sys.argv[1:])")
    assert main([str(path), "--sarfi", "x", "--lr=3", "--", "--jsno"]) == 0
    err = capsys.readouterr().err
    assert "--sarfi is passed to the script; did you mean --sarif?" in err and "['--sarfi', 'x'" in err
    assert "--lr=3 is" not in err and "--jsno is" not in err


@pytest.mark.parametrize("words", [[], ["--jsn", "train.py"], ["--sarfi", "a.sarif", "train.py"], ["--sarif"]])
def test_wrong_words_exit_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2


OTHER_PROMPT = """
import torch
from torch import nn
from earnest_audit import Step, audit

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16))
ids = torch.randint(0, 16, (4, 9))
labels = ids.clone()
labels[:, :5] = -100

def loss(model, batch):
    logits = model(torch.cat([batch["prompt"], batch["ids"][:, 5:-1]], 1))
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

audit(Step(model, loss, {"ids": ids, "labels": labels, "prompt": ids[:, :5]}, {"ids": "ids", "labels": "labels"}))
"""
WARNS = Finding("IG", "context in ids", "no change", "above 0", "warns", "The context does not matter.", "a b.py:9")


def test_a_warning_is_shown_in_every_format_and_is_no_failure() -> None:
    verdict = Verdict((HOLDS, WARNS))
    assert verdict.holds and verdict.warnings == (WARNS,) and not verdict.failures
    assert verdict.summary == "1 holds, 0 fail, 1 warns" and verdict.to_dict()["counts"]["warns"] == 1
    assert "! IG on context in ids: The context does not matter. (a b.py:9)" in str(verdict).splitlines()
    root = ElementTree.fromstring(junit(verdict))
    assert [child.tag for child in root[0][1]] == ["system-out"] and root.attrib["failures"] == "0"
    assert [r["level"] for r in json.loads(sarif(verdict))["runs"][0]["results"]] == ["warning"]
    text = markdown(verdict)
    assert text.startswith("## ✅") and "1 check holds, 1 warns, no law is broken." in text
    assert "- ⚠️ **IG** on context in ids (`a b.py:9`)" in text


def test_a_strict_verdict_fails_where_it_warned() -> None:
    verdict = Verdict((HOLDS, WARNS, SKIPPED)).strict()
    assert not verdict.holds and [f.law for f in verdict.failures] == ["IG"] and not verdict.warnings
    with pytest.raises(LawBroken, match="context in ids"):
        verdict.raise_if_failed()


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--strict"], 1)])
def test_the_exit_code_of_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    """The prompt is read from another tensor, so what stands before the supervised tokens does not matter."""
    path = script(tmp_path, OTHER_PROMPT)
    assert main([*words, str(path)]) == code
    assert ("warns" in capsys.readouterr().out) == (code == 0)


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--strict"], 1)])
def test_strict_also_counts_where_the_script_stops_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    path, report = script(tmp_path, OTHER_PROMPT + "raise SystemExit(3)"), tmp_path / "report.md"
    assert main([*words, "--markdown", str(report), str(path)]) == code
    out, text = capsys.readouterr().out, report.read_text(encoding="utf-8")
    assert all("context in ids" in shown for shown in (out, text)) and text.startswith("## ❌")
    assert ("- **AUDIT** on train.py" in text) == (code == 2) and ("- ⚠️ **IG**" in text) == (code == 2)


def test_a_verdict_of_warnings_alone_holds() -> None:
    verdict = Verdict((WARNS,))
    assert verdict.holds and verdict.raise_if_failed() is verdict and not verdict.strict().holds
    assert (
        "nothing was checked" not in markdown(verdict)
        and ElementTree.fromstring(junit(verdict)).attrib["failures"] == "0"
    )


REFUSED = """
import torch
from earnest_audit import audit

audit(torch.nn.Linear(2, 1))
"""


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (LOOP + "raise OSError('disk')", 2, "raised OSError"),
        (LOOP + "raise SystemExit(3)", 2, "ended with 3"),
        ("x = 1", 2, "trained nothing"),
        (REFUSED, 2, "raised StepError"),
        ("import os; os._exit(0)", 0, "it did not end"),
        (LOOP, 0, ""),
    ],
)
def test_reports_are_written_however_the_script_ends(text: str, code: int, sentence: str, tmp_path: Path) -> None:
    """Each replaces an older one; what was checked is in it and on stdout, with a failing row for the end."""
    path = script(tmp_path, text)
    files = {name: tmp_path / f"old.{name}" for name in ("junit", "sarif", "markdown")}
    for file in files.values():
        file.write_text("old")
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    command = [sys.executable, "-m", "earnest_audit", str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    good = not sentence
    root = ElementTree.parse(files["junit"]).getroot()
    assert (root.attrib["failures"] == "0") == good and (len(root[0]) > 4) == text.startswith(LOOP)
    assert [r["level"] for r in json.loads(files["sarif"].read_text())["runs"][0]["results"]] == ["error"] * (not good)
    shown = files["markdown"].read_text(encoding="utf-8")
    assert shown.startswith("## ✅" if good else "## ❌") and sentence in shown
    assert sentence in done.stdout or code == 0
    if text == REFUSED:
        assert len(done.stderr.splitlines()) == 1 and "a model alone cannot be audited" in done.stderr
