"""The command line: each command makes its settings, calls one function and prints what it returns.

torch is imported inside the commands, so that `earnest --help` is fast.
Exit codes: 0 done · 1 a law fails, or a run had to stop · 2 a mistake in the command or its settings · 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from earnest.commands import auditing, listings, planning
from earnest.commands.common import Overrides, show
from earnest.errors import EarnestError
from earnest.runs.errors import Interrupted

# The base class of click's errors, taken from typer, because some versions of typer contain their own click.
UsageMistake: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="earnest",
    help="Post-training of language models in which nothing fails silently.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOOPS = "Feedback loops against a server"
RESULTS = Path("earnest-eval")


def _version(wanted: bool) -> None:
    if wanted:
        from earnest import __version__

        print(f"earnest {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Post-training of language models in which nothing fails silently."""


def _print_line(name: str, value: object) -> None:
    """One line that is not wrapped: a path or a command to copy."""
    print(f"{name:<16} {value}")


@app.command()
def run(
    recipe: Annotated[
        str,
        typer.Argument(help="A name from `earnest recipes`, a YAML file, or with --resume or --replay a run folder."),
    ],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in this folder, bit for bit.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Train the asynchronous run in this folder again, from its record.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="An experiment with all its arms, controls and seeds.")] = False,
    on: Annotated[
        str, typer.Option(metavar="WHERE", help="With replicas=N: the executor that starts them (local, …).")
    ] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With replicas=N: print what would be started.")] = False,
) -> None:
    """Train."""
    from earnest import runs
    from earnest.config import recipes

    out = Console()
    if replay:
        out.print(runs.replay(Path(recipe), overrides or [], out))
        return
    from_folder = resume and not recipes.is_recipe(recipe)
    name, data = (recipe, {}) if from_folder else recipes.read(recipe, overrides or [])
    if "experiment" in data:
        experiments = recipes.experiments(name)
        page = experiments.run(name, data, overrides or [], full=full, resume=resume, console=out)
        _print_line("report", page)
        return
    if full:
        raise EarnestError(f"--full: {recipe} is one run and has no longer form; leave it out, or raise steps=.")
    from earnest.config import from_mapping
    from earnest.runs import repeat

    if resume:
        from earnest.diloco import launch

        finished: Any = (
            repeat.resume(Path(recipe), overrides or [], out)
            if repeat.is_repeated(Path(recipe))
            else runs.resume(Path(recipe), overrides or [], out, replicas=launch.resume)
        )
    else:
        config = from_mapping(data, overrides or [])
        if (on != "local" or dry_run) and not config.replicated:
            raise EarnestError("--on and --dry-run are about replicas; add replicas=N, or leave them out.")
        if config.replicated:
            from earnest.diloco import launch

            if dry_run:
                print(launch.dry_run(name, config, on))
                return
            finished = launch.start(name, config, out, on=on)
        else:
            finished = (runs.start if config.repeat is None else repeat.start)(name, config, out)
    out.print(finished)
    raise typer.Exit(finished.exit_code)


@app.command()
def data(
    source: Annotated[str, typer.Argument(metavar="FILE", help="A data file, a folder of shards, or hf:ID.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Keys of data: in a recipe, e.g. columns.prompt=question heldout=0.1."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Whose chat template and tokenizer; no weights are loaded.")] = "nano",
    rows: Annotated[int, typer.Option(min=0, help="How many rows of each side to show.")] = 3,
    html: Annotated[Path | None, typer.Option(help="Write a page with the same to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts and problems as JSON.")] = False,
) -> None:
    """Show what would be trained on: layout, trained tokens, lengths, duplicates, leakage, problems by line."""
    from earnest.data import reading

    if not source.startswith(reading.HUB):
        reading.files(source)  # raises where there are none
    from earnest.config import data_settings
    from earnest.data.dataset import Dataset
    from earnest.models.loading import load_text
    from earnest.report import data_page
    from earnest.runs.progress import count_on, note_on

    console = Console(stderr=True)
    policy = load_text(model, note_on(console))
    settings = data_settings({"train": source}, [word.removeprefix("data.") for word in overrides or []])
    with count_on(console, "reading rows", reading.count_lines(source)) as progress:
        found = Dataset.scan(settings, policy, policy.positions or 2**31, progress)
    if html is not None:
        from earnest.disk import write_text

        write_text(html, data_page.page(found, max(rows, 20)))
    if as_json:
        print(data_page.as_json(found))
    else:
        show(data_page.terminal(found, rows, coloured=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    if html is not None:
        _print_line("page", html)
    raise typer.Exit(1 if found.problems or found.leaks else 0)


@app.command()
def worker(
    run_url: Annotated[str, typer.Argument(help="The address that `earnest run … replicas=N` printed.")],
    replica: Annotated[int | None, typer.Option(min=0, help="Number of the replica; none: the first free one.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for its checkpoints; none: runs/<run>-replica-<i>.")
    ] = None,
) -> None:
    """Join a run in a bucket as one more replica."""
    from earnest.diloco.worker import work

    number = work(run_url, replica, folder, Console())
    if number is not None:
        print(f"replica {number}: the run is over")


@app.command()
def sampler(
    url: Annotated[str, typer.Argument(help="The bucket that the run names with sampler=URL (s3://…, file:///…).")],
    number: Annotated[int, typer.Option(min=0, help="Number of the sampler, below the run's sampler.count.")] = 0,
) -> None:
    """Sample for a training run through a bucket, until the run ends."""
    from earnest.runs.sampling import follow

    follow(url, number, Console())


app.command()(auditing.audit)
app.command()(planning.plan)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write one self-contained HTML page: curves, terms, evidence, samples."""
    from earnest import report as pages

    page = pages.write(run_dir)
    show(pages.summary(run_dir))
    print(page)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run folders, or a folder of runs.")],
    out: Annotated[Path, typer.Option(help="The file of the page.")] = Path("compare.html"),
) -> None:
    """Compare runs: results, differing settings and curves, in the terminal and on one self-contained page."""
    from earnest.report import compare as pages

    found = pages.runs_of(folders)
    page = pages.write(found, out)
    show(pages.terminal(found))
    print(page)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or an adapter's folder.")],
    form: Annotated[
        str,
        typer.Option(
            "--as", help="merged: a Hugging Face folder; peft: an adapter for PEFT; lora: a LoRA for servers."
        ),
    ] = "merged",
    out: Annotated[Path | None, typer.Option(help="The folder to write; none: RUN/export/FORM.")] = None,
    push: Annotated[
        str | None, typer.Option(metavar="ID", help="Upload it to this Hugging Face id; a new one is private.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The base; by default the one that the adapter names.")] = None,
) -> None:
    """Write a trained policy for other programs, and compare its logits with the run's."""
    if not run_dir.is_dir():
        raise EarnestError(f"there is no folder {run_dir}; give a run folder or its adapter/")
    from earnest.runs.export import Form
    from earnest.runs.export import export as write
    from earnest.runs.progress import note_on

    wanted: tuple[Form, ...] = get_args(Form)
    chosen = next((name for name in wanted if name == form), None)
    if chosen is None:
        raise EarnestError(f"--as is {form!r}; give one of {', '.join(wanted)}.")
    print(write(run_dir, out, form=chosen, push=push, model=model, say=note_on(Console(stderr=True))))


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
    from earnest.chat import Chat, converse

    talk = Chat(model, adapter, system=system, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    converse(talk, Console(), sys.stdin)


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="The address to listen on; any other than loopback needs --keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    model: Annotated[str, typer.Option(help="nano, smollm2, a Hugging Face id, or a folder.")] = "nano",
    data: Annotated[Path, typer.Option(help="The folder of the database and of all versions.")] = Path("earnest-data"),
    keys: Annotated[Path | None, typer.Option(help="A YAML file of API keys; without it, loopback only.")] = None,
    learn: Annotated[Path | None, typer.Option(help="A YAML file with the settings for learning.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="An adapter that exists from the start; may be repeated.")
    ] = None,
    keep_days: Annotated[float | None, typer.Option(help="Delete conversations after this many days.")] = None,
    client_learn: Annotated[bool, typer.Option(help="Whether clients may change learning settings.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    new_key: Annotated[str | None, typer.Option(help="Print a new API key with this name, and exit.")] = None,
) -> None:
    """Chat that learns from its users' feedback, in one process on one port."""
    if new_key is not None:
        from earnest.serve.keys import new_key as make

        key, entry = make(new_key)
        print(f"{key}\n\nThis key is shown once. Put these lines into the file for --keys:\n\nkeys:\n{entry}")
        return
    from earnest.config.loading import check_mapping
    from earnest.serve.server import run as listen
    from earnest.serve.settings import ServeSettings

    given = {
        "host": host,
        "port": port,
        "model": model,
        "data": data,
        "keys": keys,
        "learn": learn,
        "adapters": tuple(adapter or ("assistant",)),
        "client_learn": client_learn,
        "keep_days": keep_days,
        "threads": threads,
    }
    listen(check_mapping(ServeSettings, given))


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
    """Make preference pairs from traces; the same command again continues where it stopped."""
    from earnest.replay import report as pages
    from earnest.replay.pipeline import replay as make_pairs
    from earnest.replay.settings import read

    out = Console()
    with pages.stage_bars(out) as bars:
        found = make_pairs(traces, read(config, overrides or []), bars)
    data, page = pages.write(found)
    pages.show(data, out)
    _print_line("pairs", found.path)
    _print_line("report", page)
    _print_line("train on them", f"earnest run prefer data={found.path}")


@app.command("eval")
def evaluate(
    what: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN | PREFERENCES.yaml]",
            help="A run folder or an adapter: measure it on a task. A YAML file of preferences (none: those for nano): "
            "feedback loops against a server.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="With RUN: task=NAME prompts=200 samples=4 temperature=0."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The address of a running server; none: one is started.", rich_help_panel=LOOPS)
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the results.", rich_help_panel=LOOPS)] = RESULTS,
    model: Annotated[str, typer.Option(help="Without --url: the model to serve.", rich_help_panel=LOOPS)] = "nano",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of feedback.", rich_help_panel=LOOPS)] = None,
    per_round: Annotated[int | None, typer.Option(min=1, help="Prompts per round.", rich_help_panel=LOOPS)] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Capability questions.", rich_help_panel=LOOPS)] = None,
    only: Annotated[list[str] | None, typer.Option(help="A preference; repeatable.", rich_help_panel=LOOPS)] = None,
) -> None:
    """Measure a trained adapter on a task, or how a server learns preferences from feedback."""
    if what is not None and not what.exists() and "=" not in what.name:
        raise EarnestError(
            f"{what}: there is no such run folder or file of preferences; `earnest runs` lists the runs."
        )
    if what is not None and (what.is_dir() or "=" in what.name):
        if url or rounds or per_round or questions or only:
            raise EarnestError(f"the options of `{LOOPS.lower()}` have no meaning for a run folder; leave them out.")
        if not what.is_dir():
            raise EarnestError(f"{what}: give the run folder first, e.g. earnest eval runs/mine {what}.")
        from earnest.runs.measure import measure
        from earnest.runs.progress import note_on

        show(measure(what, overrides or [], note_on(Console(stderr=True))))
        return
    if overrides:
        raise EarnestError(f"{overrides[0]}: key=value belongs to a run folder; {what} is a file of preferences.")
    from earnest.serve.eval.command import run as measure_loops
    from earnest.serve.eval.preferences import read

    changes = {"rounds": rounds, "per_round": per_round, "questions": questions}
    measure_loops(read(what, changes, only or []), out, url=url, model=model)


for listing in (
    listings.recipes,
    listings.objectives,
    listings.adapters,
    listings.tasks,
    listings.models,
    listings.runs,
    listings.doctor,
):
    app.command()(listing)


def main(arguments: list[str] | None = None) -> None:
    """Run the command. A user's mistake ends it with one sentence on stderr."""
    try:
        code = app(arguments, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = _fail("stopped; nothing was being trained", 130)
    except UsageMistake as error:
        error.show()
        code = error.exit_code
    except Interrupted as stop:
        code = _fail(str(stop), stop.exit_code)
    except EarnestError as error:
        code = _fail(str(error), getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str, code: int) -> int:
    print(f"earnest: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
