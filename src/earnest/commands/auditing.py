"""`earnest audit`: the laws of a training step, of a grader, of a sampling server, or of the tests of a user's code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from earnest.commands.common import Overrides
from earnest.errors import EarnestError
from earnest_audit.frontends.command import begin_reports, report

if TYPE_CHECKING:
    from earnest_audit import Verdict


def audit(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, a YAML file, a training script (.py), the place of a task (my_task.py:Name), or "
            "`sampler URL`: a server."
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The cheap laws only.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings are failures.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the verdict as JUnit XML.")] = None,
    sarif: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the verdict as SARIF 2.1.0.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the verdict as Markdown.")] = None,
    tests: Annotated[Path | None, typer.Option(help="List the mutants of --source that these tests miss.")] = None,
    source: Annotated[Path | None, typer.Option(help="With --tests: the file or folder to mutate.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tests: N mutants, evenly spread.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --tests: results (JSON lines), to continue from.")] = None,
    model: Annotated[str, typer.Option(help="With sampler: the model that the server should run.")] = "nano",
    folder: Annotated[
        Path | None, typer.Option(help="With sampler: a folder that vLLM or SGLang reads under the same path.")
    ] = None,
    key: Annotated[
        str, typer.Option(help="With sampler: the environment variable with the server's API key.")
    ] = "EARNEST_SAMPLER_KEY",
) -> None:
    """Prove the training step of a recipe or a script (further arguments go to the script); exit 1 if a law fails.

    With my_task.py:Name, audit the grader of that task; KEY=VALUE are the settings of its class. With `sampler URL`,
    check that the server there can sample for a run; temperature=T is the run's.
    """
    if tests is not None:
        raise typer.Exit(_score_tests(tests, source, limit, out, as_json))
    if recipe is None:
        raise EarnestError(
            "give something to audit: a recipe (see `earnest recipes`), a script.py, my_task.py:Name, or --tests PATH."
        )
    files = {"junit": junit, "sarif": sarif, "markdown": markdown}
    begin_reports(files, Path(recipe))
    if recipe == "sampler":
        found = _sampler_verdict(overrides or [], model, folder, key)
    elif ":" in recipe:
        found = _grader_verdict(recipe, overrides or [])
    elif recipe.endswith(".py"):
        from earnest_audit.frontends.script import audit_script

        found = audit_script(Path(recipe), overrides or [], quick=quick, strict=strict)
    else:
        found = _recipe_verdict(recipe, overrides or [], quick)
    raise typer.Exit(report(found.strict() if strict else found, as_json=as_json, files=files))


def _grader_verdict(task: str, overrides: list[str]) -> Verdict:
    """The audit of the grader of ``my_task.py:Name``."""
    from earnest.config.loading import check_mapping
    from earnest.config.schema import TaskConfig
    from earnest.tasks import Environment, Task, get_task, is_environment
    from earnest.tasks.audit import audit_grader

    given = check_mapping(TaskConfig, {"name": task}, overrides)
    found: Task | Environment = get_task(given.name, given.fields)
    if is_environment(found):
        raise EarnestError(f"{task} is an environment; audit its conversations with: earnest audit agent task={task}")
    return audit_grader(found)


def _sampler_verdict(arguments: list[str], model: str, folder: Path | None, key: str) -> Verdict:
    """The contract between trainer and sampler, on the server at a URL."""
    from earnest.runs.progress import note_on
    from earnest.runs.sampling import audited

    if not arguments or not arguments[0].startswith(("http://", "https://")):
        raise EarnestError("give the address of the server: earnest audit sampler http://127.0.0.1:8000 --model FOLDER")
    return audited(arguments[0], arguments[1:], model, folder, key, note_on(Console(stderr=True)))


def _recipe_verdict(recipe: str, overrides: list[str], quick: bool) -> Verdict:
    from earnest import runs
    from earnest.config import recipes

    if (Path(recipe) / "run.json").is_file():
        raise EarnestError(
            f"{recipe} is a run folder: `earnest report {recipe}` shows its verdict, and `earnest audit "
            f"{Path(recipe) / 'config.yaml'}` audits its step again."
        )
    progress = Console(stderr=True)
    name, data = recipes.read(recipe, overrides)
    if "experiment" in data:
        return recipes.experiments(name).check(data, overrides, quick=quick, console=progress)
    from earnest.config import from_mapping

    return runs.check(from_mapping(data, overrides), progress, quick=quick)


def _score_tests(tests: Path, source: Path | None, limit: int | None, out: Path | None, as_json: bool) -> int:
    """Print the mutants of ``source`` that the tests do not detect; 1 if there are any."""
    from earnest.mutation import score_tests

    if source is None:
        raise EarnestError("--tests needs --source: the file or folder of training code that the tests check.")
    found = score_tests(tests, source, out=out, limit=limit, progress=lambda line: print(line, file=sys.stderr))
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print(found.table())
        for o in found.survivors:
            print(f"survived: {o.file}:{o.line}: {o.what}")
    return 1 if found.survivors else 0
