"""The GitHub Action of earnest-audit and its example workflow: they fit together, and the action's script runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from earnest_audit.frontends.command import make_parser
from scripts.docs.pages import ROOT

FOLDER = ROOT / "earnest-audit" / "action"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())
EXAMPLE = yaml.safe_load((FOLDER / "example.yml").read_text())
STEPS = EXAMPLE["jobs"]["audit"]["steps"]


def test_the_example_gives_what_the_action_takes_and_uploads_what_it_writes() -> None:
    (audit,) = [step for step in STEPS if "earnest-audit/action@" in step.get("uses", "")]
    assert set(audit["with"]) <= set(ACTION["inputs"])
    needed = {name for name, given in ACTION["inputs"].items() if given.get("required")}
    assert needed <= set(audit["with"])
    (upload,) = [step for step in STEPS if step.get("uses", "").startswith("github/codeql-action/upload-sarif@")]
    assert upload["with"]["sarif_file"] == f"${{{{ steps.{audit['id']}.outputs.sarif }}}}"
    assert upload["if"].startswith("always()"), "a broken law fails the step before"
    assert EXAMPLE["permissions"]["security-events"] == "write"


def test_every_step_of_the_action_has_a_shell_and_reads_inputs_by_the_environment_alone() -> None:
    """An input inside a script could run as code."""
    assert ACTION["runs"]["using"] == "composite"
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash" and "${{" not in step["run"]
        for value in step["env"].values():
            (name,) = re.findall(r"inputs\.([\w-]+)", value)
            assert name in ACTION["inputs"]
    known = {name for action in make_parser()._actions for name in action.option_strings}
    assert set(re.findall(r"--[a-z]+", ACTION["runs"]["steps"][-1]["run"])) <= known


def run(folder: Path, script: str) -> tuple[int, dict[str, str], str]:
    """The exit code of the action's script for this training script, its outputs, and its summary."""
    (folder / "train.py").write_text(script)
    written = {name: folder / name.lower() for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for file in written.values():
        file.touch()
    names = {"SCRIPT": "train.py --steps 2", "OPTIONS": "--quick", "FOLDER": "out"}
    environment = os.environ | names | {name: str(file) for name, file in written.items()} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    command = ["bash", "-e", "-c", ACTION["runs"]["steps"][-1]["run"]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line.split("=", 1) for line in written["GITHUB_OUTPUT"].read_text().splitlines()]
    return done.returncode, dict(lines), written["GITHUB_STEP_SUMMARY"].read_text()


def test_the_script_of_the_action_writes_its_files_and_ends_with_the_exit_code(tmp_path: Path) -> None:
    code, outputs, summary = run(
        tmp_path, "from earnest_audit import Census, audit\naudit(Census(wanted=['a'], found=[]))\n"
    )
    assert code == 1 and "CENSUS" in summary
    for name, output in ACTION["outputs"].items():
        assert output["value"] == f"${{{{ steps.audit.outputs.{name} }}}}"
        assert (tmp_path / outputs[name]).is_file()


def test_a_script_that_ends_before_its_verdict_fails_and_shows_no_older_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("audit.sarif", "audit.xml", "audit.md"):
        (tmp_path / "out" / name).write_text("an older verdict")
    code, outputs, summary = run(tmp_path, "import os\nos._exit(0)\n")
    assert code == 2 and outputs.keys() == {"sarif", "junit"} and "did not end" in summary
    assert not any("older" in file.read_text() for file in (tmp_path / "out").iterdir())
