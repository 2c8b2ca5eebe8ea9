"""`earnest chat`: a conversation with a policy, with or without an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

HELP = "/reset forgets the conversation · /base and /adapter switch the adapter off and on · /quit leaves"


class Chat:
    """One conversation. If ``adapted`` is true the adapter gives the next answer, else the base policy."""

    def __init__(
        self,
        model: str | None = None,
        adapter: Path | None = None,
        *,
        system: str | None = None,
        temperature: float = 0.7,
        max_new_tokens: int = 64,
        seed: int = 0,
    ) -> None:
        self.adapter: Any = None
        if adapter is None:
            from earnest.models import load

            self.policy = load(model or "nano")
        else:
            from earnest.adapters.trained import load_trained

            self.policy, self.adapter = load_trained(adapter, model)
        self.adapted = self.adapter is not None
        self.temperature, self.max_new_tokens, self.seed = temperature, max_new_tokens, seed
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str) -> str:
        """The policy's answer to ``text``; both are added to the conversation."""
        from earnest.models import SampleSpec, sample

        self.messages.append({"role": "user", "content": text})
        spec = SampleSpec(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=self.seed + len(self.messages)
        )
        with nullcontext() if self.adapter is None or self.adapted else self.adapter.off():
            (completion,) = sample(self.policy, [self.policy.render(self.messages)], 1, spec)
        reply = self.policy.decode(completion.tokens).strip()
        self.messages.append({"role": "assistant", "content": reply})
        return reply


def converse(chat: Chat, console: Console, source: TextIO) -> None:
    """Read lines until the end of input or /quit; answer each."""
    prompting = source.isatty()
    console.print(chat.policy.describe(), style="dim", markup=False, highlight=False, soft_wrap=True)
    if prompting:
        console.print(f"[dim]{HELP}[/]", highlight=False)
    for line in _lines(console, source, prompting):
        if line == "/quit":
            return
        if line == "/reset":
            chat.reset()
        elif line in ("/base", "/adapter"):
            if chat.adapter is None:
                console.print("there is no adapter; start with --adapter DIR", style="yellow")
            chat.adapted = chat.adapter is not None and line == "/adapter"
        elif line.startswith("/"):
            console.print(f"{line.split()[0]} is not a command; {HELP}", style="yellow", markup=False, highlight=False)
        else:
            name = "adapter" if chat.adapted else "base" if chat.adapter is not None else chat.policy.name
            console.print(f"{name}> ", style="bold green", end="", markup=False, highlight=False)
            console.print(chat.answer(line), markup=False, highlight=False, soft_wrap=True)


def _lines(console: Console, source: TextIO, prompting: bool) -> Iterator[str]:
    while True:
        if prompting:
            console.print("[bold]you>[/] ", end="")
        line = source.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
