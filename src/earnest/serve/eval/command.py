"""`earnest eval PREFERENCES`: feedback loops against a server, measured and printed."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from earnest.errors import SamplingError
from earnest.serve.eval.client import EvalClient, EvalError
from earnest.serve.eval.figure import draw
from earnest.serve.eval.loop import evaluate, summarise, table
from earnest.serve.eval.preferences import FeedbackEvalConfig
from earnest.sync.own_server import OwnServer

KEY = "EARNEST_API_KEY"


def run(config: FeedbackEvalConfig, out: Path, *, url: str | None = None, model: str = "nano") -> None:
    """Measure every preference and print the results; without ``url``, against a server started for this."""
    with ExitStack() as stack:
        if url is None:
            try:
                server = OwnServer({"port": 0, "model": model})
            except SamplingError as error:
                raise EvalError(str(error).removeprefix("sampler.port: ")) from None
            stack.callback(server.close)
            url = server.url
            print(f"serving {model} at {url} for this evaluation", flush=True)
        client = EvalClient(url, os.environ.get(KEY))
        rounds = evaluate(client, config, out, lambda line: print(line, flush=True))
    picture = draw(rounds, out / "eval.png")
    print(f"\n{table(summarise(rounds))}\nfigure  {picture}\nrounds  {out / 'steps.jsonl'}")
