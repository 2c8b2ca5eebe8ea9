"""The command line. It parses, calls, prints and chooses the exit code; torch is imported inside the commands.

Exit codes: 0 done · 1 a law is broken, or a run had to stop · 2 a mistake in what was asked · 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from earnest.errors import EarnestError

# click's base of all its errors, from typer: some versions carry a click of their own.
UsageMistake: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="earnest",
    help="Post-training of language models in which nothing fails silently.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="e.g. seed=3 steps=20 optimizer.lr=1e-4 objective.0.clip=0.3 out=DIR"
    ),
]


@app.command()
def run(
    recipe: Annotated[
        str, typer.Argument(help="A name from `earnest recipes`, a YAML file, or with --resume a run folder.")
    ],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in this folder, bit for bit.")] = False,
    full: Annotated[bool, typer.Option("--full", help="An experiment with all its arms, controls and seeds.")] = False,
    on: Annotated[str, typer.Option(metavar="WHERE", help="With replicas=N: what starts them (local, …).")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With replicas=N: print what would be started.")] = False,
) -> None:
    """Train."""
    from earnest import console

    console.run(recipe, overrides or [], resume, full, on, dry_run)


@app.command()
def worker(
    run_url: Annotated[str, typer.Argument(help="The address that `earnest run … replicas=N` printed.")],
    replica: Annotated[int | None, typer.Option(min=0, help="Which replica to be; none: the first free one.")] = None,
    folder: Annotated[Path | None, typer.Option(help="For its checkpoints; none: runs/<run>-replica-<i>.")] = None,
) -> None:
    """Join a run that lives in a bucket, as one more replica."""
    from earnest import console

    console.worker(run_url, replica, folder)


@app.command()
def audit(
    recipe: Annotated[
        str | None, typer.Argument(help="A name from `earnest recipes`, a YAML file, or a training script (.py).")
    ] = None,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The cheap laws only.")] = False,
    tests: Annotated[Path | None, typer.Option(help="Mutate --source under these tests; list what they miss.")] = None,
    source: Annotated[Path | None, typer.Option(help="With --tests: the file or folder to mutate.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tests: so many mutants, evenly spread.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --tests: results as JSON lines; goes on from them.")] = None,
) -> None:
    """Prove a training step: a recipe's, or a script's (extra words are its own); exit 1 where a law is broken."""
    from earnest import console

    if tests is not None:
        raise typer.Exit(console.score_tests(tests, source, limit, out, json))
    if recipe is None:
        raise EarnestError("audit what? Give a recipe (`earnest recipes` lists them), a script.py, or --tests PATH.")
    if recipe.endswith(".py"):
        raise typer.Exit(console.audit_script(Path(recipe), overrides or [], json, quick))
    raise typer.Exit(console.audit(recipe, overrides or [], json, quick))


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write one self-contained HTML page: curves, terms, evidence, samples."""
    from earnest import console

    console.report(run_dir)


@app.command()
def chat(
    adapter: Annotated[Path | None, typer.Option(help="A run folder, or an adapter in PEFT's format.")] = None,
    model: Annotated[str | None, typer.Option(help="A model; by default the adapter's, or nano.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of an answer.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answers.")] = 0,
) -> None:
    """Talk to a policy; reads standard input."""
    from rich.console import Console

    from earnest.chat import Chat, converse

    talk = Chat(model, adapter, system=system, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    converse(talk, Console(), sys.stdin)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="The address to listen on; beyond loopback it needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    model: Annotated[str, typer.Option(help="nano, smollm2, a Hugging Face id, or a folder.")] = "nano",
    data: Annotated[Path, typer.Option(help="The folder of the database and of all versions.")] = Path("earnest-data"),
    keys: Annotated[Path | None, typer.Option(help="A YAML file of API keys; without it, loopback only.")] = None,
    learn: Annotated[Path | None, typer.Option(help="A YAML file that says how adapters learn.")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="An adapter that shall exist; may be repeated.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    new_key: Annotated[str | None, typer.Option(help="Print a fresh API key of this name, and end.")] = None,
) -> None:
    """Chat that learns from what its users say, in one process on one port."""
    from earnest.serve import console

    console.serve(host, port, model, data, keys, learn, adapter, threads, new_key)


@app.command()
def replay(
    traces: Annotated[Path, typer.Argument(help="A .jsonl file: OpenAI-style messages, or what `earnest serve` logs.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="e.g. out=pairs.parquet teachers.0.kind=policy judge.kind=teacher"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with teachers, judge and filters.")] = None,
) -> None:
    """Traces into preference pairs; the same command again goes on where it stopped."""
    from earnest.replay import console

    console.replay(traces, overrides or [], config)


@app.command("eval")
def evaluate(
    preferences: Annotated[
        Path | None, typer.Argument(help="A YAML file of preferences; none: those for nano.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A live server; none: one is started for the evaluation.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("earnest-eval"),
    model: Annotated[str, typer.Option(help="Without --url: the model to serve.")] = "nano",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of feedback for each preference.")] = None,
    per_round: Annotated[int | None, typer.Option(min=1, help="Prompts a round.")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Capability questions.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A preference by its name; may be repeated.")] = None,
) -> None:
    """Feedback loops on preferences against a live server: does it learn, and what does it cost?"""
    from earnest.serve.eval import console

    changes = {"rounds": rounds, "per_round": per_round, "questions": questions}
    console.run(preferences, url, out, model, changes, only or [])


@app.command()
def recipes() -> None:
    """What can be run."""
    from earnest import console

    console.recipes()


@app.command()
def objectives(kind: Annotated[str | None, typer.Argument(help="Show the fields of this one.")] = None) -> None:
    """The terms of a loss, each with its paper."""
    from earnest import console

    console.objectives(kind)


@app.command()
def adapters(
    check: Annotated[
        bool, typer.Option("--check", help="Run the conformance checks of every adapter; exit 1 on a failure.")
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="The checks, and torch.compile(fullgraph=True) of every adapter.")
    ] = False,
) -> None:
    """The adapters, each with its paper and its learning rate."""
    from earnest import console

    raise typer.Exit(console.adapters(check, compile))


@app.command()
def tasks() -> None:
    """What there is to learn."""
    from earnest import console

    console.tasks()


@app.command()
def models() -> None:
    """What can be loaded by name."""
    from earnest import console

    console.models()


def main(arguments: list[str] | None = None) -> None:
    """Run the command; every mistake of the user is one sentence on stderr."""
    try:
        code = app(arguments, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = _say("stopped; nothing was being trained", 130)
    except UsageMistake as error:
        error.show()
        code = error.exit_code
    except EarnestError as error:
        code = _say(str(error), getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _say(text: str, code: int) -> int:
    print(f"earnest: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
