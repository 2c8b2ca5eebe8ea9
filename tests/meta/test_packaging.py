"""The wheel holds what the package needs at run time; make and pre-commit do what CONTRIBUTING.md says."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.docs.pages import ROOT
from scripts.pins import OWN
from scripts.try_wheels import LOOP

# Files of src/earnest that are not needed at run time.
LEFT_OUT = {".pyc"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of what git knows or would add, so that a stale build folder cannot lend a file."""
    return _build(tmp_path_factory.mktemp("wheel"), ".")


@pytest.fixture(scope="module")
def audit_wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return _build(tmp_path_factory.mktemp("audit-wheel"), "earnest-audit")


def _build(tmp: Path, project: str) -> zipfile.ZipFile:
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "src",
            "earnest-audit",
            "MANIFEST.in",
            "pyproject.toml",
            "README.md",
            "LICENSE",
            "NOTICE",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (tmp / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp / "tree" / name)
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp)], cwd=tmp / "tree" / project, check=True, capture_output=True, text=True
    )
    (path,) = tmp.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.integration
def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    inside = set(wheel.namelist())
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/earnest"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    wanted = {n.removeprefix("src/") for n in listed if Path(n).suffix not in LEFT_OUT and (ROOT / n).is_file()}
    assert not wanted - inside, f"not in [tool.setuptools.package-data]: {sorted(wanted - inside)}"
    assert any(n.endswith("/licenses/LICENSE") for n in inside) and any(n.endswith("/licenses/NOTICE") for n in inside)


@pytest.mark.integration
def test_the_wheel_holds_the_package_alone_and_names_the_clone_for_an_experiment(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"earnest"}
    assert not [name for name in wheel.namelist() if "experiments/" in name]
    wheel.extractall(tmp_path / "site")
    for command in (["run", "hacking"], ["audit", "heal"]):
        done = subprocess.run(
            [sys.executable, "-m", "earnest.cli", *command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"earnest: {command[1]} is an experiment") and "clone" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.integration
def test_the_audit_is_a_wheel_of_its_own(wheel: zipfile.ZipFile, audit_wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """No file is in both wheels, and every file of the package is in its wheel. With torch and numpy alone, without
    rich and without earnest, it audits a step, prints the verdict, and lists the laws."""
    inside = {name for name in audit_wheel.namelist() if ".dist-info/" not in name}
    assert not inside & set(wheel.namelist())
    folder = ROOT / "earnest-audit" / "src"
    files = {p.relative_to(folder).as_posix() for p in (folder / "earnest_audit").rglob("*") if p.is_file()}
    assert {name for name in files if "__pycache__" not in name} == inside
    audit_wheel.extractall(tmp_path / "site")
    _link(tmp_path / "site", "torch", "numpy")
    (tmp_path / "train.py").write_text(ALONE)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
    code += "from earnest_audit.frontends.command import main; "
    code += "sys.exit(main(['--sarif', 'out.sarif', 'train.py']) or main(['laws']))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[]\n" in done.stderr and "the training step, checked" in done.stdout and "PG-CLIP" in done.stdout
    assert (tmp_path / "out.sarif").is_file()
    (entries,) = [name for name in audit_wheel.namelist() if name.endswith("entry_points.txt")]
    written = audit_wheel.read(entries).decode()
    assert "[console_scripts]\nearnest-audit = earnest_audit.frontends.command:main" in written
    assert "[pytest11]\nearnest-audit = earnest_audit.frontends.pytest_plugin" in written


ALONE = """
import sys
from importlib.util import find_spec
import torch
from earnest_audit import Step, audit
model = torch.nn.Linear(3, 1)
loss = lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean()
print(audit(Step(model=model, loss=loss, batch={"x": torch.randn(4, 3), "y": torch.randn(4, 1)})))
print([name for name in ("earnest", "rich", "transformers", "pytest") if find_spec(name)])
"""


def _link(site: Path, *names: str) -> None:
    """Links to what these distributions and their requirements installed, and to nothing else."""
    todo, seen = list(names), set(OWN)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            place = Path(str(found.locate_file(top)))
            if not (site / top).exists() and place.exists():
                (site / top).symlink_to(place)
        todo += _required(found.requires or ())


def _required(lines: Iterable[str]) -> list[str]:
    """The names of the requirements that hold here without an extra."""
    needs = (Requirement(text) for text in lines)
    return [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


@pytest.mark.integration
def test_the_wheels_need_only_what_they_require(
    wheel: zipfile.ZipFile, audit_wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """In an environment that has the two wheels and links to what their metadata requires, the commands and the
    pytest plugin work. `make wheels` does the same with everything installed anew."""
    environment = tmp_path / "env"
    venv.create(environment)
    (site,) = environment.glob("lib/python*/site-packages")
    files = [str(w.filename) for w in (audit_wheel, wheel)]
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    into = ("--python", str(environment / "bin/python"), "install", "--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", *into, *files)
    for file in (wheel, audit_wheel):
        (metadata,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        _link(site, *_required(email.message_from_bytes(file.read(metadata)).get_all("Requires-Dist", [])))
    run(str(environment / "bin/earnest"), "run", "quickstart", "steps=2", "eval.prompts=4", "eval.samples=1", "out=run")
    assert (tmp_path / "run/report.html").is_file()
    run(str(environment / "bin/earnest"), "audit", "quickstart", "--quick")
    _link(site, "pytest")
    (tmp_path / "train.py").write_text(LOOP)
    assert "1 passed" in run(str(environment / "bin/python"), "-m", "pytest", "-q", "--audit", "train.py")


@pytest.mark.integration
def test_the_wheel_stays_small(wheel: zipfile.ZipFile) -> None:
    size = sum(info.compress_size for info in wheel.infolist())
    assert size < 12_000_000, f"{size / 1e6:.1f} MB"


def test_make_alone_lists_the_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "test-integrations", "lint", "nightly", "bench", "docs-tables", "clean"):
        assert f"make {target} " in done.stdout


def _would_run(*words: str, **environment: str) -> str:
    """The commands that make would run, in a tree whose environment is already there."""
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True, env=clean | environment
    ).stdout


def _copy_what_make_reads(place: Path) -> None:
    (place / "earnest-audit").mkdir()
    for name in ("Makefile", "pyproject.toml", "earnest-audit/pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, place / name)


def test_make_demo_installs_only_the_base_and_runs_quickstart(tmp_path: Path) -> None:
    _copy_what_make_reads(tmp_path)
    plan = _would_run("-C", str(tmp_path), "demo")
    assert "python3 -m venv .venv" in plan
    assert "--constraint constraints.txt  --editable ./earnest-audit --editable ." in plan and "[dev]" not in plan
    assert "earnest run quickstart" in plan


def test_a_second_make_installs_nothing(tmp_path: Path) -> None:
    _copy_what_make_reads(tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    first = _would_run("-C", str(tmp_path), "test")
    assert "'.[test]'" in first and "'.[dev]'" not in first and "'.[dev]'" in _would_run("-C", str(tmp_path), "lint")
    (stamp,) = {w for line in first.splitlines() if line.startswith("touch") for w in line.split() if ".test-" in w}
    (tmp_path / stamp).touch()
    assert "pip install" in first and "pip install" not in _would_run("-C", str(tmp_path), "test")
    with (tmp_path / "constraints.txt").open("a") as file:
        file.write("# another version\n")
    assert "pip install" in _would_run("-C", str(tmp_path), "test")


def test_browser_tests_are_left_out_only_where_there_is_no_browser_and_no_ci(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("python3", "sh", "grep", "make"):
        (tools / tool).symlink_to(Path(shutil.which(tool) or "").resolve())
    assert "not slow and not vllm and not gpu and not browser" in _would_run("test-integrations", PATH=str(tools))
    assert "not browser" not in _would_run("test-integrations", PATH=str(tools), CI="true")
    (tools / "chromium").symlink_to("/bin/true")
    assert "not browser" not in _would_run("test-integrations", PATH=str(tools))


@pytest.mark.integration
def test_pre_commit_installs_and_its_hooks_are_known(tmp_path: Path) -> None:
    """`.venv/bin/pre-commit install`, in a repository of its own so that this one keeps its hooks."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    pre_commit = Path(sys.executable).with_name("pre-commit")
    subprocess.run([pre_commit, "validate-config", ".pre-commit-config.yaml"], cwd=tmp_path, check=True)
    subprocess.run(
        [pre_commit, "install"], cwd=tmp_path, check=True, env=os.environ | {"PRE_COMMIT_HOME": str(tmp_path / "home")}
    )
    assert (tmp_path / ".git/hooks/pre-commit").is_file()
