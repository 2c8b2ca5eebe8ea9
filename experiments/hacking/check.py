"""`earnest audit hacking`: the guarded step of each arm, on a batch of the arm's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from earnest.errors import ObjectiveError
from earnest.proving import prove as prove_step
from earnest.seeds import derive
from earnest.tasks import PromptStream, get_task
from earnest_audit import Verdict
from experiments.hacking.config import Config
from experiments.hacking.plan import plan
from experiments.hacking.train import OBJECTIVE, build, rows_with_spread

TRIES = 8


def prove(config: Config, *, quick: bool, progress: Callable[[str], None]) -> Verdict:
    """The verdict on every arm of the short plan. All arms have the same loss, so its laws are checked once; law GL and
    the guard's effect are checked for each arm."""
    verdict = Verdict(())
    for number, job in enumerate(plan(config, full=False)):
        progress(f"extracting directions for {job.name}")
        engine, _, _ = build(config, job)
        stream = PromptStream(get_task("holes"), derive(job.seed, "check") % 2**31)
        for attempt in range(TRIES):
            _, batch = rows_with_spread(engine, config, job, stream.next(config.prompts_per_step), None, attempt)
            if batch is not None:
                break
        else:
            raise ObjectiveError(
                f"{job.name}: in {TRIES} batches all answers to a prompt had the same reward, so there is no step to "
                "prove; raise prompts_per_step or completions_per_prompt."
            )
        found = prove_step(engine, OBJECTIVE, batch, quick=quick or number > 0, progress=progress)
        named = tuple(replace(f, subject=f"{job.arm}: {f.subject}") for f in found.findings)
        verdict += replace(found, findings=named)
    return verdict
