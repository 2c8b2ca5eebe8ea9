"""What a person sees while an audit goes on: one line that changes on a terminal, a line a law elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


@contextmanager
def shown(console: Console) -> Iterator[Callable[[str], None]]:
    """A function for ``progress=``."""
    if not console.is_terminal:
        yield lambda text: console.print(f"{text} …", style="dim", markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("auditing …") as status:
        yield lambda text: status.update(f"auditing: {escape(text)} …")
