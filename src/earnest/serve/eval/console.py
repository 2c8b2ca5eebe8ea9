"""What `earnest eval` prints."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from earnest.errors import ConfigError, nearest
from earnest.serve.eval.client import Client, own_server
from earnest.serve.eval.figure import draw
from earnest.serve.eval.loop import evaluate, summarise, table
from earnest.serve.eval.preferences import read

KEY = "EARNEST_API_KEY"


def run(
    preferences: Path | None, url: str | None, out: Path, model: str, overrides: dict[str, Any], only: list[str]
) -> None:
    """Evaluate; without an address, against a server that lives as long as this."""
    config = read(preferences, overrides)
    known = [p.name for p in config.preferences]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: there is no such preference; {nearest(unknown[0], known)}")
    chosen = [p for p in config.preferences if not only or p.name in only]
    config = config.model_copy(update={"preferences": chosen})
    with ExitStack() as stack:
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="earnest-eval-")))
            url = stack.enter_context(own_server(folder / "data", model))
            print(f"serving {model} at {url} for this evaluation", flush=True)
        client = Client(url, os.environ.get(KEY))
        rounds = evaluate(client, config, out, lambda line: print(line, flush=True))
    picture = draw(rounds, out / "eval.png")
    print(f"\n{table(summarise(rounds))}\nfigure  {picture}\nrounds  {out / 'steps.jsonl'}")
