"""The training loop. One step, left to right:

    prompts → sample → grade → advantages → batch → reference signals → step (updates_per_batch times) → metrics

Every random number is a function of (seed, purpose, step), so the loop's state is the step and the stream's position.
"""

from __future__ import annotations

import errno
import functools
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from earnest.errors import EarnestError, NothingToTrain
from earnest.objectives import Objective
from earnest.proving import prove, prove_conversations
from earnest.report.watch import BEFORE_TRAINING, RunWatch
from earnest.rollouts import Rollouts, rewrites_history
from earnest.runs import checkpoints, verdicts
from earnest.runs.ahead import BatchesAhead, ReplayedBatches
from earnest.runs.best import Best
from earnest.runs.collect import BatchSource, own_rows, own_samples, sample_record, spec_of
from earnest.runs.errors import Interrupted, RunStopped
from earnest.runs.evaluate import HeldOutEvaluation, evaluate
from earnest.runs.folder import RunFolder
from earnest.runs.lines import step_line
from earnest.runs.loggers import Logger
from earnest.runs.progress import ProgressReporter
from earnest.runs.setup import Setup
from earnest.runs.stopping import Stopper
from earnest.seeds import derive
from earnest.signals import Batch
from earnest.tasks import PromptStream, is_environment
from earnest.tasks.audit import grader_warnings
from earnest_audit import Verdict

PROBE_TRIES = 8
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@dataclass
class TrainingLoop:
    """A run in progress: ``step`` steps are done, in ``seconds`` of training over all sessions. ``evaluations`` are the
    lines of all held-out evaluations so far; ``restore`` reads those of earlier sessions."""

    setup: Setup
    run: RunFolder
    progress: ProgressReporter
    loggers: list[Logger]
    step: int = 0
    seconds: float = 0.0
    replay: Path | None = None
    """The folder of an asynchronous run whose rollouts are trained on again."""

    def __post_init__(self) -> None:
        self.stream: Mapping[str, Any] | None = None
        self.saved_at = -1
        self.begun = False
        """Whether this session has begun a step."""
        self.line: dict[str, Any] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.watch = RunWatch()
        self.best = None if self.setup.config.best is None else Best(self.setup.config.best)

    def restore(self) -> None:
        """Go back to the newest undamaged checkpoint, or to the beginning if there is none."""
        mesh = self.setup.mesh
        found = mesh.from_first(checkpoints.newest(self.run) if mesh.rank == 0 else None)
        if found is None:
            self.run.cut({})
            self.run.event("info", "resumed from the beginning: there is no whole checkpoint")
            return
        folder, state = found
        self.run.cut(state["lengths"])
        self.setup.engine.load(folder / checkpoints.ENGINE)
        self.stream = state["stream"]
        self.step = self.saved_at = int(state["step"])
        self.seconds = float(state["seconds"])
        earlier = self.run.metrics.read()
        self.evaluations = [line for line in earlier if line["kind"] == "eval"]
        self.watch = RunWatch(earlier)
        self.best = None if self.setup.config.best is None else Best(self.setup.config.best, earlier)
        self.run.event("info", f"resumed after step {self.step}, from {folder.name}")

    @functools.cached_property
    def source(self) -> BatchSource:
        """The batches of the run, from its beginning or from the state of the stream in a checkpoint."""
        samplers = self.setup.samplers
        if self.replay is not None:
            return ReplayedBatches(self.setup, self.replay)
        if samplers is not None and samplers.staleness:
            return BatchesAhead(self.setup, samplers, self.run, self.stream)
        return BatchSource(self.setup, position=0 if self.stream is None else int(self.stream["position"]))

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.saved_at == self.step:
            return
        state = {"stream": self.source.state(), "seconds": self.seconds}
        best = None if self.best is None else self.best.step
        checkpoints.save(self.run, self.setup.engine, self.step, state, self.setup.config.checkpoint.keep, best)
        self.saved_at = self.step

    def train(self) -> None:
        """Check the step, evaluate, train the steps that are left, evaluate again; progress and loggers end with it."""
        config = self.setup.config
        self.run.update(status="running", reason=None, steps=config.steps, steps_done=self.step)
        self.progress.start(config.steps, self.step)
        try:
            self._train_and_report()
        finally:
            self.progress.close()
            for logger in self.loggers:
                logger.close()

    @property
    def place(self) -> str:
        """Where the run is, for a sentence."""
        steps = self.setup.config.steps
        return f"in step {min(self.step + 1, steps)} of {steps}" if self.begun else f"before its first step of {steps}"

    def _train_and_report(self) -> None:
        with Stopper(self.progress.note) as stopper, self.writing():
            try:
                with self.setup.mesh.explained():
                    self._train(stopper)
            except Interrupted:
                raise
            except KeyboardInterrupt:
                self._interrupted(stopper.requested or signal.SIGINT, max(self.saved_at, 0))
            except EarnestError as error:
                self._end("failed", str(error))
                raise RunStopped(
                    f"the run stopped {self.place}: {error}\nIts folder is whole: {self.run.path}"
                ) from error
            except OSError:
                raise
            except Exception as error:
                self._end("failed", f"{type(error).__name__}: {error}")
                raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """If a file cannot be written inside the block (a full disk), the run ends with one sentence."""
        try:
            yield
        except OSError as error:
            if error.errno not in UNWRITABLE:
                self._end("failed", f"{type(error).__name__}: {error}")
                raise
            reason = f"{error.filename or self.run.path}: {error.strerror or error}"
            with suppress(OSError):  # the same disk
                self._end("failed", reason)
            raise RunStopped(
                f"the run stopped {self.place}, because it cannot write {reason}. Its last checkpoint is whole: make "
                f"room, then continue with: {self.again()}"
            ) from error

    def _train(self, stopper: Stopper) -> None:
        config = self.setup.config
        for weighted in self.setup.objective.live():
            if weighted.weight < 0:
                self.warn(
                    f"{weighted.term.label} has the weight {weighted.weight:g}, so its loss is raised instead of "
                    "lowered (a policy gradient trains the reward away); give a positive weight unless you want this."
                )
        if not verdicts.holds(self.run.path):
            self._check()
        if self.step == 0:
            self._evaluate("before")
        while self.step < config.steps and self.ended is None:
            self._stop_if_asked(stopper)
            self._one_step(self.step + 1)
            due = config.eval.every and self.step % config.eval.every == 0
            if due and self.step < config.steps and self.ended is None:
                self._evaluate(None)
            if self.step % config.checkpoint.every == 0:
                self.save()
        self.save()
        self._stop_if_asked(stopper)
        if self.ended is not None and self.stalled is None:
            self.progress.note(f"stopping early: {self.ended}")
        self._evaluate("after")

    def _one_step(self, step: int) -> None:
        config, engine, objective = self.setup.config, self.setup.engine, self.setup.objective
        self.begun = True
        torch.manual_seed(derive(config.seed, "step", step))
        started = time.perf_counter()
        collected = self._collect(step)
        batch = collected.batch
        sampled = time.perf_counter()
        live = [w.term.label for w in objective.live()]
        shares = len(live) > 1 and config.shares_every > 0 and step % config.shares_every == 0
        report, idle = None, {}
        try:
            for update in range(1, config.updates_per_batch + 1):
                engine.plan((step - 1) * config.updates_per_batch + update, config.updates)
                report = engine.step(batch, objective, shares=shares and update == config.updates_per_batch)
        except NothingToTrain as nothing:
            idle = nothing.idle
        done = time.perf_counter()
        self.step, self.seconds = step, self.seconds + done - started
        seconds = {"sample" if collected.attempts else "rows": sampled - started, "train": done - sampled}
        self.line = step_line(step, engine, objective, collected, seconds, report or idle)
        self._write_line(self.line)
        for number, a in enumerate(collected.attempts[: config.samples.train]):
            taught = collected.taught[number] if collected.taught else ()
            self.run.samples.append(sample_record(a, "train", step, self.setup.policy, taught))

    def _write_line(self, line: dict[str, Any]) -> None:
        """Write the line of a step or an evaluation, show it, and warn if a condition of the watch is true of the last
        lines. The best evaluation so far gets a checkpoint."""
        evaluation = line["kind"] == "eval"
        if evaluation:
            self.evaluations.append(line)
        self.run.metrics.append(line)
        for logger in self.loggers:
            logger.log(line)
        (self.progress.evaluation if evaluation else self.progress.step)(line)
        for warning in self.watch.add(line):
            self.warn(warning)
        if self.best is not None and self.best.add(line):
            self.save()

    @property
    def ended(self) -> str | None:
        """Why the run stops before its last step: a warning, or no better evaluation for a while; else None."""
        return self.stalled or (None if self.best is None else self.best.ended)

    @property
    def result(self) -> dict[str, Any]:
        """The evaluation of the policy that the run ends with: the best one, or the last."""
        step = None if self.best is None else self.best.step
        return next((line for line in self.evaluations if line["step"] == step), self.evaluations[-1])

    @property
    def stalled(self) -> str | None:
        """The warning that stops this run; None if there is none, or if ``on_stall`` is "warn"."""
        return next(iter(self.watch.warnings), None) if self.setup.config.on_stall == "stop" else None

    def warn(self, sentence: str) -> None:
        """Show a warning, and record it."""
        self.run.event("warning", sentence)
        self.progress.warn(sentence)

    def _collect(self, step: int) -> Rollouts:
        """A replica counts the rewards here."""
        return self.source.next(step)

    def _check(self) -> None:
        """Prove the step before training with it; a law that fails ends the run here."""
        if not self.setup.config.check:
            self.run.event("warning", "check is false: the step was not checked")
            return
        started = time.perf_counter()
        self.progress.note("checking the training step")
        for warning in task_warnings(self.setup):
            self.warn(warning)
        engine, objective = self.setup.require_local("check"), self.setup.objective
        batch = probe_batch(self.setup)
        if batch.advantages is not None and not bool(batch.advantages.any()):
            others = without_rewards(objective, batch)
            flat = f"in {PROBE_TRIES} batches no two completions of a prompt differ in their reward"
            if not others.terms:
                raise EarnestError(
                    f"{flat}, and no other term has a row to learn from, so nothing was checked. {BEFORE_TRAINING} "
                    "With check=false the run trains without this check."
                )
            if self.setup.mesh.size == 1:  # with several, the ranks' batches may differ in which terms have rows
                objective = others
                checked = ", ".join(w.term.label for w in others.terms)
                self.warn(f"{flat}, so the other terms alone are checked ({checked}). {BEFORE_TRAINING}")
        verdict = prove(engine, objective, batch, quick=True)
        verdict += conversation_verdict(self.setup)
        verdicts.write(self.run.path, verdict, self.step, time.perf_counter() - started)
        verdict.raise_if_failed()

    def _evaluate(self, phase: str | None) -> None:
        self.progress.note(f"evaluating {phase or f'after step {self.step}'}")
        started = time.perf_counter()
        found = evaluate(self.setup, self.step)
        if self.step not in [line["step"] for line in self.evaluations]:
            self._write_line(found.record(time.perf_counter() - started))
        if phase == "after":
            found = self._go_to_best() or found
        if phase is not None:
            firsts = [a for a in found.attempts if a.rollout.sample_index == 0]
            shown = firsts[: self.setup.config.samples.heldout]
            samples = [sample_record(a, phase, found.step, self.setup.policy) for a in shown]
            if found.own is not None:
                own = found.own
                samples += own_samples(self.setup, phase, found.step, found.version, own.measure, own.each)
            if phase == "before":
                samples += own_rows(self.setup)
            for sample in samples:
                self.run.samples.append(sample)
        self.run.update(steps_done=self.step, seconds=round(self.seconds, 3))

    def _go_to_best(self) -> HeldOutEvaluation | None:
        """Load the best checkpoint and evaluate it, unless the policy is that of its step already."""
        if self.best is None or self.best.step is None:
            return None
        self.run.update(best=self.best.record())
        if self.best.step == self.step:
            return None
        by = self.best.config.metric
        self.run.event("info", f"the result is the checkpoint of step {self.best.step}, the best by {by}")
        best = self.setup.mesh.from_first(checkpoints.place(self.run, self.best.step))
        self.setup.engine.load(best / checkpoints.ENGINE)
        return evaluate(self.setup, self.best.step)

    def _stop_if_asked(self, stopper: Stopper) -> None:
        if (requested := self.setup.mesh.any(stopper.requested)) is not None:
            self.save()
            self._interrupted(requested, self.step)

    def _interrupted(self, number: int, resumable: int) -> None:
        self.step = resumable
        self._end("interrupted", f"{signal.Signals(number).name} after step {resumable}")
        raise Interrupted(self.again(), resumable, self.setup.config.steps, number)

    def again(self) -> str:
        """The command that continues this run."""
        return f"earnest run {self.run.path} --resume"

    def _end(self, status: str, reason: str) -> None:
        self.run.update(status=status, reason=reason, steps_done=self.step, seconds=round(self.seconds, 3))
        self.run.event("error" if status == "failed" else "warning", f"{status}: {reason}")


def task_warnings(setup: Setup) -> list[str]:
    """One sentence for each thing about the task that a user should know before training."""
    task = setup.task
    if is_environment(task):
        rewritten = rewrites_history(setup.policy, with_tools=bool(task.tools))
        return [] if rewritten is None else [rewritten]
    return [] if task is None else grader_warnings(task)


def conversation_verdict(setup: Setup) -> Verdict:
    """The laws of conversations, on some with the run's environment; empty for a task of one turn."""
    if not is_environment(setup.task):
        return Verdict(())
    seed = derive(setup.config.seed, "check conversations")
    prompts = PromptStream(setup.task, seed % 2**31).next(2)
    engine, spec, turns = setup.require_local("check"), spec_of(setup, seed), setup.config.turns
    return prove_conversations(engine, setup.task, prompts, 2, spec, turns, sample=setup.elsewhere)


def without_rewards(objective: Objective, batch: Batch) -> Objective:
    """The live terms that have rows in a batch whose advantages are all 0. There are none if they only hold the policy
    back (a KL, a barrier): then there is nothing to learn from."""
    idle = objective.check(batch)
    rest = [w for w in objective.live() if "advantages" not in w.term.signals() and w.term.label not in idle]
    learns = any("teacher" in w.term.signals() or "rollout" not in w.term.roles for w in rest)
    return replace(objective, terms=tuple(rest) if learns else ())


def probe_batch(setup: Setup) -> Batch:
    """A batch to prove the step on, from its own stream of prompts, so that the order of the training data stays.
    Completions of one prompt that all have the same reward give a zero policy gradient, also in a correct step. Such
    rows are left out; a batch with no other rows is replaced by the next one."""
    source = BatchSource(setup, "check")
    for attempt in range(PROBE_TRIES):
        batch = source.next(attempt).batch
        if batch.advantages is not None:
            idle = batch.has_role(("rollout",))
            idle[batch.row[batch.advantages != 0]] = False
            nonzero = (~idle).nonzero()[:, 0]
            batch = batch.rows(nonzero) if len(nonzero) else batch
        with suppress(NothingToTrain):
            idle_terms, *_ = setup.objective.prepare(batch, {})
            if not idle_terms and (batch.advantages is None or bool(batch.advantages.any())):
                break
    return batch
