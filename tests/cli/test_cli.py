"""The commands, as a user meets them: real processes where the process matters, ``main`` where only the words do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from earnest import cli
from tests.runs.tiny import recipe, tiny_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """`earnest run r.yaml seed=3 steps=2` in a folder of its own, as a process; the folder is its cwd."""
    place = tmp_path_factory.mktemp("cwd")
    recipe(place / "r.yaml", tiny)
    return process("run", "r.yaml", "seed=3", "steps=2", "optimizer.lr=0.3", cwd=place)


def process(*arguments: str, cwd: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [Path(sys.executable).with_name("earnest"), *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "COLUMNS": "160"},
    )
    done.args = cwd
    return done


def run_folder(trained: subprocess.CompletedProcess[str]) -> Path:
    (folder,) = (Path(trained.args) / "runs").iterdir()
    return folder


def main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_run_trains_and_prints_the_next_commands(trained: subprocess.CompletedProcess[str]) -> None:
    assert trained.returncode == 0, trained.stderr
    folder = run_folder(trained)
    assert folder.name.startswith("r-")
    for words in (
        "held-out reward",
        "±",
        "gain",
        f"runs/{folder.name}/report.html",
        f"earnest chat --adapter runs/{folder.name}",
    ):
        assert words in trained.stdout
    assert "step 2/2" in trained.stdout, "plain lines where there is no terminal"
    assert "seed: 3" in (folder / "config.yaml").read_text()
    assert (folder / "report.html").exists()


def test_report_again(trained: subprocess.CompletedProcess[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(trained)
    (folder / "report.html").unlink()
    code, out, _ = main(capsys, "report", str(folder))
    assert code == 0 and str(folder / "report.html") in out.replace("\n", "")
    assert (folder / "report.html").exists()
    code, _, err = main(capsys, "report", str(folder.parent / "nothing"))
    assert code == 2 and "there is no such folder" in err


def test_chat_with_and_without_the_adapter(
    trained: subprocess.CompletedProcess[str],
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/base gives the untouched model's answer, the adapter another; its config names the model."""
    import io

    def talk(stdin: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code, out, _ = main(capsys, "chat", "--temperature", "0", "--max-new-tokens", "12", *arguments)
        assert code == 0
        return [line for line in out.splitlines() if "> " in line or "is not a command" in line]

    folder = str(run_folder(trained))
    plain = talk("sort 312\n", "--model", str(tiny))
    assert len(plain) == 1 and plain[0].startswith(str(tiny)[:20])
    adapted, base, again, unknown = talk(
        "sort 312\n/reset\n/base\nsort 312\n/reset\n/adapter\nsort 312\n/dance\n/quit\nsort 312\n", "--adapter", folder
    )
    said = plain[0].split("> ", 1)[1]
    assert base == f"base> {said}"
    assert adapted == again and adapted.startswith("adapter> ") and adapted != f"adapter> {said}"
    assert "/dance is not a command" in unknown
    assert talk("hi\n", "--adapter", f"{folder}/adapter")[0].startswith("adapter> ")


def test_chat_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = main(capsys, "chat", "--adapter", str(tmp_path / "no"))
    assert code == 2 and "there is no folder" in err
    code, _, err = main(capsys, "chat", "--adapter", str(tmp_path))
    assert code == 2 and "holds no adapter_config.json" in err
    code, _, err = main(capsys, "chat", "--model", "./nowhere")
    assert code == 2 and "nowhere" in err


def test_audit_holds_on_the_quickstart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = main(capsys, "audit", "quickstart", "--json")
    verdict = json.loads(out)
    assert (code, verdict["holds"]) == (0, True), [f for f in verdict["findings"] if f["outcome"] == "fails"]
    assert list(tmp_path.iterdir()) == [], "nothing was trained or written"


def test_audit_exits_1_on_a_broken_law(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate of 0 trains nothing, and the finding says so."""
    code, out, _ = main(capsys, "audit", str(recipe(tmp_path / "r.yaml", tiny)), "optimizer.lr=0", "--json")
    failed = [f["measured"] for f in json.loads(out)["findings"] if f["outcome"] == "fails"]
    assert code == 1 and "0 changed their bits" in failed


MISTAKES = [
    (("run", "quikstart"), "did you mean 'quickstart'?"),
    (("run", "quickstart", "stesp=2"), "stesp: unknown key; did you mean 'steps'?"),
    (("run", "quickstart", "optimizer.lr=fast"), "optimizer.lr: must be a finite number"),
    (("run", "quickstart", "task=srot"), "task 'srot' is unknown"),
    (("run", "quickstart", "model=./nowhere"), "nowhere"),
    (("run", "missing.yaml"), "there is no file missing.yaml"),
    (("run", "nowhere", "--resume"), "there is no run folder nowhere"),
    (("audit", "quickstart", "steps=0"), "steps: must be at least 1"),
    (("objectives", "gro"), "did you mean"),
    (("tasks", "srot"), "did you mean 'sort'?"),
    (("run", "quickstart", "task={name: sort, digits: 3}"), "task.digits: the task sort has no settings"),
    pytest.param(
        ("run", "quickstart", "task={name: reasoning_gym/chain_sum, min_term: 3}"),
        "did you mean 'min_terms'?",
        marks=pytest.mark.integration,
    ),
    pytest.param(
        ("run", "quickstart", "task={name: reasoning_gym/chain_sum, min_terms: 0}"),
        "refuses min_terms=0",
        marks=pytest.mark.integration,
    ),
    (("runn",), "No such command 'runn'"),
    (("run",), "recipe"),
    (("chat", "--temperature", "-1"), "--temperature"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES)
def test_a_mistake_is_exit_2_and_one_sentence(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = main(capsys, *arguments)
    assert code == 2
    assert says.lower() in err.lower() and "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_a_mistake_in_a_real_process(tmp_path: Path) -> None:
    done = process("run", "quickstart", "optimizer.lrr=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "optimizer.lrr: unknown key; did you mean 'lr'?" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        (("recipes",), ["quickstart", "sft", "nano", "sort", "grpo"]),
        (("objectives",), ["grpo", "sft", "advantages", "arXiv"]),
        (("objectives", "grpo"), ["clip", "0.2", "above 0"]),
        (("adapters",), ["lora", "2106.09685", "rank=8"]),
        (("tasks",), ["sort", "style/volume", "built-in"]),
        (("--version",), ["earnest 0."]),
        (("tasks", "sort"), ["sort the digits", "three held-out prompts", "The answer is empty."]),
        pytest.param(
            ("tasks", "reasoning_gym/chain_sum"),
            ["min_terms", "max_digits", "State the final answer"],
            marks=pytest.mark.integration,
        ),
        (("models",), ["nano", "smollm2", "Apache-2.0"]),
    ],
)
def test_what_there_is(
    command: tuple[str, ...], shows: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    code, out, _ = main(capsys, *command)
    assert code == 0
    for word in shows:
        assert word in out, word


def test_every_command_is_documented_and_works(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = main(capsys, "--help")
    names = {c.name or c.callback.__name__ for c in cli.app.registered_commands}  # type: ignore[union-attr]
    assert code == 0 and names == {
        "run",
        "audit",
        "plan",
        "report",
        "chat",
        "recipes",
        "objectives",
        "adapters",
        "tasks",
        "models",
        "eval",
        "replay",
        "serve",
        "worker",
        "sampler",
        "data",
        "runs",
        "doctor",
        "compare",
        "export",
    }
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    for name in names:
        assert f"earnest {name}" in page, name
        assert main(capsys, name, "--help")[0] == 0


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom earnest import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'yaml', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_carries_its_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib import resources

    names = {p.name for p in (resources.files("earnest") / "recipes").iterdir()}
    assert {"quickstart.yaml", "sft.yaml"} <= names


def test_names_of_tasks_are_never_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns every name is on one line, ready to be copied."""
    from earnest.tasks import list_tasks

    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = main(capsys, "tasks")
    assert len(out.splitlines()) < 80
    words = [*out.split(), *main(capsys, "tasks", "reasoning_gym")[1].split()]
    assert code == 0 and [info.name for info in list_tasks() if info.name not in words] == []
