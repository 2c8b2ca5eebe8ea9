"""The public workflows run what .ci/run runs, and only targets of make that exist."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml

from scripts.docs.pages import ROOT

WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(workflow: Any) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def made(lines: list[str]) -> set[str]:
    """The targets that these lines make."""
    return {target for line in lines for target in re.findall(r"^(?:run_tests )?make ([a-z-]+)", line.strip())}


def test_the_workflows_make_what_ci_makes() -> None:
    script = made((ROOT / ".ci/run").read_text().splitlines())
    assert {"lint", "demo", "test", "test-integrations", "environments"} <= script
    assert script <= made(commands(WORKFLOWS["ci.yml"]))


def test_every_target_exists() -> None:
    for name, workflow in WORKFLOWS.items():
        assert made(commands(workflow)) <= TARGETS, name


def test_what_is_installed_with_pip_comes_with_the_audit() -> None:
    """earnest needs earnest-audit of the same commit, which no index has."""
    lines = [line for workflow in WORKFLOWS.values() for line in commands(workflow) if "pip install" in line]
    assert lines and all("./earnest-audit" in line for line in lines if line.endswith(" ."))


def test_the_wheels_are_tried_in_empty_environments() -> None:
    """In the public workflow and in `make nightly`; tests/meta/test_packaging.py does it with links in every run."""
    assert "wheels" in made(commands(WORKFLOWS["ci.yml"])) and "nightly" in made(commands(WORKFLOWS["nightly.yml"]))
    assert re.search(r"^nightly:.* wheels ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_python_of_the_package_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {c.rsplit(" ", 1)[-1] for c in project["classifiers"] if "Python :: 3." in c}
    assert listed <= set(WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"])
