"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

LINES = 20
"""The number of plain lines per run, about, where there is no terminal."""


class ProgressReporter(Protocol):
    """Shows what happens in a run."""

    def start(self, steps: int, done: int) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, line: dict[str, Any]) -> None: ...

    def evaluation(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def reporter_on(console: Console) -> ProgressReporter:
    """Bars on a terminal, plain lines elsewhere."""
    return Bars(console) if console.is_terminal else Plain(console)


def note_on(console: Console) -> Callable[[str], None]:
    """A function that prints what is being done, before a run has its reporter."""
    return lambda text: console.print(f"{text} …", style="dim", markup=False, highlight=False, soft_wrap=True)


def loss_text(line: dict[str, Any]) -> str:
    """Each term's loss, or why there is none."""
    return " ".join(f"{label} {_number(term['loss'])}" for label, term in line["terms"].items()) or "no update (idle)"


def reward_text(line: dict[str, Any]) -> str:
    return f"reward {line['reward']['mean']:.3f}" if "reward" in line else ""


def heldout_text(line: dict[str, Any]) -> str:
    spread = "" if line["se"] is None else f" ± {line['se']:.3f}"
    return f"held-out {line['reward']:.3f}{spread} (n = {line['n']}, {line['prompts']} prompts)"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:+.4f}"


class Bars:
    """Live bars with the reward, each term's loss, and the last held-out reward."""

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
        facts = f"[green]{reward_text(line)}[/]  [dim]{escape(loss_text(line))}[/]"
        # a step faster than the next refresh is still seen once
        self.progress.update(self.bar, completed=line["step"], facts=facts, refresh=True)

    def evaluation(self, line: dict[str, Any]) -> None:
        self.progress.console.print(f"  step {line['step']:>4}  [bold green]{heldout_text(line)}[/]")

    def close(self) -> None:
        self.progress.stop()


class Plain:
    """A line now and then, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps = 0

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, steps: int, done: int) -> None:
        self.steps = steps

    def note(self, text: str) -> None:
        self._say(f"{text} …")

    def step(self, line: dict[str, Any]) -> None:
        every = max(1, self.steps // LINES)
        if line["step"] % every == 0 or line["step"] in (1, self.steps):
            self._say(f"step {line['step']}/{self.steps}  {reward_text(line)}  {loss_text(line)}".rstrip())

    def evaluation(self, line: dict[str, Any]) -> None:
        self._say(f"step {line['step']}/{self.steps}  {heldout_text(line)}")

    def close(self) -> None:
        """Nothing to take down."""
