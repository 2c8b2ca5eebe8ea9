"""`earnest eval PREFERENCES`: feedback loops against a server, measured and printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from earnest.errors import MissingExtra, SamplingError
from earnest.serve.eval.client import EvalClient, EvalError
from earnest.serve.eval.loop import Round, evaluate, summarise, table
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


COLOURS = ("#0b6e99", "#b8461f", "#5a7d1e", "#7b4f9d", "#8a6d00", "#a1325e")


def draw(rounds: Sequence[Round], path: Path) -> Path:
    """A PNG of margin, compliance, capability and collapse, round by round."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("matplotlib", "plots", "the figure of earnest eval") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    first = {r.preference: r.margin for r in rounds if r.round == 0}
    panels = (
        ("margin gained (nats per pair)", lambda r: r.margin - first[r.preference], None),
        ("compliance", lambda r: r.compliance, (-0.04, 1.04)),
        ("capability", lambda r: r.capability, (-0.04, 1.04)),
        ("entropy ratio", lambda r: r.collapse.get("entropy_ratio", 1.0), None),
    )
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), constrained_layout=True)
    names = list(dict.fromkeys(r.preference for r in rounds))
    for axis, (title, value, limits) in zip(axes, panels, strict=True):
        for name, colour in zip(names, COLOURS * len(names), strict=False):
            own = [r for r in rounds if r.preference == name]
            axis.plot([r.round for r in own], [value(r) for r in own], "o-", color=colour, label=name, ms=4, lw=1.6)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("round of feedback", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if limits:
            axis.set_ylim(limits)
    axes[-1].axhline(1.0, color="#888", lw=0.8, ls="--")
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
