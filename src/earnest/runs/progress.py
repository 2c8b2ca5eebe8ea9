"""How a run shows its progress: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from earnest.report.markup import time_left
from earnest.runs.comparison import with_error

LINES = 20
"""About how many plain lines a run prints without a terminal."""


def reporter_on(console: Console) -> ProgressReporter:
    """Bars on a terminal, plain lines elsewhere."""
    return Bars(console) if console.is_terminal else Plain(console)


def note_on(console: Console) -> Callable[[str], None]:
    """A function that prints what is being done; used until a run has its reporter."""
    return lambda text: console.print(f"{text} …", style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def laws_on(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows the law that begins: one line that changes on a terminal, a line for each law elsewhere."""
    if not console.is_terminal:
        yield note_on(console)
        return
    began = time.monotonic()
    with console.status("auditing …") as status:

        def show(text: str) -> None:
            place = re.match(r"law (\d+)/(\d+)", text)
            left = time_left(time.monotonic() - began, int(place[1]) - 1, int(place[2])) if place else ""
            status.update(f"auditing: {escape(text)}{left} …")

        yield show


@contextmanager
def count_on(console: Console, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A function that shows how many there are so far, in a line that changes; without a terminal it shows nothing."""
    if not console.is_terminal:
        yield lambda _: None
        return
    began = time.monotonic()
    of = "" if total is None else f" of {total:,}"
    with console.status(f"{what} …") as status:
        yield lambda n: status.update(f"{what}: {n:,}{of}{time_left(time.monotonic() - began, n, total or 0)} …")


def facts(line: dict[str, Any]) -> str:
    """A step in one line: losses (not those of policy gradients, whose value has no meaning), the gradient norm, the
    share of groups without spread, entropy in nats per token, trained tokens per second. Missing ones are left out."""
    if not line["terms"]:
        return "no update (idle)"
    shown = {label: t["loss"] for label, t in line["terms"].items() if not t.get("surrogate")}
    losses = [f"{label} ?" if loss is None else f"{label} {loss:+.4f}" for label, loss in shown.items()]
    metrics, seconds = line["metrics"], sum(line["seconds"].values())
    gradient, flat, entropy = line["grad_norm"], metrics.get("groups_without_spread"), metrics.get("entropy")
    return "  ".join(
        [
            *losses,
            *([] if gradient is None else [f"gradient {gradient:.3g}"]),
            *([] if flat is None else [f"no spread {flat:.0%}"]),
            *([] if entropy is None else [f"entropy {entropy:.2f}"]),
            *([f"{line['tokens'] / seconds:,.0f} tokens/s"] if line.get("tokens") and seconds else []),
        ]
    )


def reward_text(line: dict[str, Any]) -> str:
    return f"reward {line['reward']['mean']:.3f}" if "reward" in line else ""


def heldout_text(line: dict[str, Any]) -> str:
    """An evaluation in one line: its result, then the rewards of further tasks."""
    return "; ".join([_result_text(line), *_further_texts(line["metrics"])])


def _further_texts(metrics: dict[str, float]) -> list[str]:
    names = [name.removesuffix("/reward") for name in metrics if name.startswith("eval/") and name.endswith("/reward")]
    return [
        f"{name.removeprefix('eval/')} {with_error(metrics[f'{name}/reward'], metrics.get(f'{name}/reward_se'))}"
        for name in names
    ]


def _result_text(line: dict[str, Any]) -> str:
    measure = line.get("measure", "reward")
    result = with_error(line[measure], line["se"])
    if measure == "reward":
        return f"held-out {result} (n = {line['n']}, {line['prompts']} prompts)"
    more = line["metrics"].get("heldout/perplexity")
    more = "" if more is None else f", perplexity {more:.3f}"
    return f"held-out {measure} {result}{more} ({line['prompts']} rows)"


class Bars:
    """Live bars with the reward, the facts of the step, and each held-out reward above them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.bar: Any = None

    def start(self, steps: int, done: int) -> None:
        self.bar = self.progress.add_task("steps", total=steps, completed=done, facts="")
        self.progress.start()

    def note(self, text: str) -> None:
        if self.bar is None:
            self.console.print(f"{text} …", style="dim", markup=False, highlight=False)
        else:
            self.progress.update(self.bar, facts=f"[dim]{escape(text)} …[/]")

    def step(self, line: dict[str, Any]) -> None:
        shown = f"[green]{reward_text(line)}[/]  [dim]{escape(facts(line))}[/]"
        # refresh at once, so that a step shorter than the refresh interval is shown
        self.progress.update(self.bar, completed=line["step"], facts=shown, refresh=True)

    def evaluation(self, line: dict[str, Any]) -> None:
        self.progress.console.print(f"  step {line['step']:>4}  [bold green]{heldout_text(line)}[/]")

    def warn(self, text: str) -> None:
        self.progress.console.print(f"warning: {text}", style="bold yellow", markup=False, highlight=False)

    def close(self) -> None:
        self.progress.stop()


class Plain:
    """About ``LINES`` lines for the whole run, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps = self.done = 0
        self.began = time.monotonic()

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, steps: int, done: int) -> None:
        self.steps, self.done, self.began = steps, done, time.monotonic()

    def note(self, text: str) -> None:
        self._print(f"{text} …")

    def step(self, line: dict[str, Any]) -> None:
        every = max(1, self.steps // LINES)
        if line["step"] % every == 0 or line["step"] in (1, self.steps):
            left = time_left(time.monotonic() - self.began, line["step"] - self.done, self.steps - self.done)
            self._print(f"step {line['step']}/{self.steps}{left}  {reward_text(line)}  {facts(line)}".rstrip())

    def evaluation(self, line: dict[str, Any]) -> None:
        self._print(f"step {line['step']}/{self.steps}  {heldout_text(line)}")

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def close(self) -> None:
        """Nothing to close."""


ProgressReporter = Bars | Plain
"""Shows the progress of a run."""
