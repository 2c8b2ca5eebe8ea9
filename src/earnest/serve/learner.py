"""The learner: takes feedback in order, makes a version from it, and makes that version live if the gate passes it.

    queued feedback ─► rows ─► teacher shown the feedback ─► audit ─► steps ─► gate ─► folder ─► ONE transaction ─► live

If the process is killed before the transaction, the feedback is still queued and the folder belongs to no version;
after it, the version exists. So a feedback is part of exactly one version. Adapters take turns, one version each.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from earnest.config.schema import TeacherConfig
from earnest.disk import clean
from earnest.engines import LocalEngine
from earnest.engines import state as engine_state
from earnest.engines.micro import Micro
from earnest.errors import EarnestError
from earnest.models import SampleSpec
from earnest.objectives.needs import LogProb
from earnest.proving import prove
from earnest.serve import gate, learning, lessons, versions
from earnest.serve.attempts import REASON
from earnest.serve.decode import Request, decode
from earnest.serve.errors import reason
from earnest.serve.host import Cancelled, Stopping, Turn
from earnest.serve.learning import LearnConfig
from earnest.serve.lessons import Lessons
from earnest.serve.rows import AdapterRow
from earnest.signals import Batch, EMATeacher, with_reference, with_teacher
from earnest_audit.verdict import Finding, Verdict

if TYPE_CHECKING:
    from earnest.serve.state import State

log = logging.getLogger("earnest.serve")
SHOWN = 3  # answers before and after, kept with a version
ANSWER = 24  # tokens of such an answer
RETRY = 5.0  # seconds before a full disk is tried again; twice as many each time, up to
RETRY_MOST = 120.0
FULL = (OSError, MemoryError, SafetensorError, sqlite3.Error)  # failures of the machine, not of the feedback


class YieldingEngine(LocalEngine):
    """A ``LocalEngine`` that yields its turn before every forward pass. Between micro-batches no autograd graph
    exists, so nothing depends on the adapter scales that are 0 meanwhile."""

    turn: Turn

    def _hidden(self, part: Micro) -> Float[Tensor, "N d"]:
        self.turn.yield_turn()
        return super()._hidden(part)


class Learner:
    """One thread, one update at a time; ``doing`` describes it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.config = learning.read(state.settings.learn)
        self.doing: dict[str, Any] | None = None
        self.updates = 0
        # adapter → feedback up to this number is learned one by one: one of them fails
        self._alone: dict[int, int] = {}
        self._later: dict[int, tuple[float, float]] = {}  # adapter → (not before, seconds waited); the others go on
        self._served: dict[int, int] = {}  # adapter → the number of its latest turn
        self._running: int | None = None  # the adapter that learns now
        self._cancel = threading.Event()  # ends the update that runs
        self._bases: dict[str, gate.ProbeAnswers] = {}
        self._event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="earnest-learn", daemon=True)

    def start(self) -> None:
        for number in self.state.attempts.set_aside():
            if (row := self.state.store.adapter_by_id(number)) is not None:
                log.error("%s is set aside: %s", row.name, REASON)
                self.state.bus.publish("learn", row.name, phase="set aside", reason=REASON)
        for row in self.state.store.adapters():
            try:
                config = learning.overridden(self.config, row.learn)
                learning.check_adapter(row, learning.made_with(self.state.store, row), config)
            except EarnestError as error:
                log.error("%s cannot learn: %s", row.name, error)
        self._event.set()  # feedback may be queued from an earlier process
        self._thread.start()

    def wake(self) -> None:
        self._event.set()

    def cancel(self, adapter: int) -> None:
        """End the update of this adapter, if one runs, without a version. The caller settles its feedback."""
        if self._running == adapter:
            self._cancel.set()

    def close(self) -> None:
        self._event.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        stopping = self.state.host
        while not stopping.stopping:
            soonest = min((when for when, _ in self._later.values()), default=None)
            self._event.wait(None if soonest is None else max(0.0, soonest - time.monotonic()))
            self._event.clear()
            try:
                while not stopping.stopping and (row := self._next()) is not None:
                    self._one(row)
            except Stopping:
                return
            except Exception:  # an error of the store: nothing was changed; try again later
                log.exception("the learner could not reach its store")
                time.sleep(RETRY)
                self._event.set()
            finally:
                self.doing = None

    def _next(self) -> AdapterRow | None:
        """The adapter whose latest turn is longest ago; among those that had none, the one that has waited longest.
        Adapters that are set aside, or that wait before they retry (a full disk, for example), are left out."""
        now = time.monotonic()
        waiting = {adapter: wait for adapter, wait in self._later.items() if wait[0] > now}
        but = self.state.attempts.set_aside() | set(waiting)
        rows = [row for row in self.state.store.waiting_to_learn() if row.id not in but]
        if not rows:  # no adapter that could learn now has queued feedback
            self._later = waiting
            return None
        row = min(rows, key=lambda r: self._served.get(r.id, 0))
        self._served[row.id] = max(self._served.values(), default=0) + 1
        return row

    def _one(self, row: AdapterRow) -> None:
        """Make one version of one adapter, with a row in ``attempts`` meanwhile."""
        done = False
        self._cancel.clear()
        self._running = row.id
        self.state.attempts.begin(row.id)
        try:
            done = self._attempt(row)
        finally:
            self._running = None
            self.state.attempts.end(row.id, done=done)

    def _attempt(self, row: AdapterRow) -> bool:
        """False where the same update is to be tried again later; feedback that cannot be learned from fails with the
        reason."""
        state = self.state
        feedback = state.store.queued(row.id, 1)
        if not feedback:  # cancelled or deleted since
            return True
        try:
            config = learning.overridden(self.config, row.learn)
            if feedback[0].seq > self._alone.get(row.id, 0):
                feedback = state.store.queued(row.id, config.batch) or feedback
            self._learn(row, config, feedback)
            self._later.pop(row.id, None)
        except Cancelled:
            state.bus.publish("learn", row.name, phase="cancelled", feedback=[f.id for f in feedback])
        except FULL as error:
            pause = min(2 * self._later[row.id][1], RETRY_MOST) if row.id in self._later else RETRY
            self._later[row.id] = (time.monotonic() + pause, pause)
            why = reason(error)
            log.error("a version of %s was not written, it is tried again in %g s: %s", row.name, pause, why)
            state.bus.publish("learn", row.name, phase="waiting", reason=why)
            return False
        except Stopping:
            raise
        except Exception as error:
            if not isinstance(error, EarnestError):
                log.exception("an update of %s failed", row.name)
            if len(feedback) > 1:  # find out which one fails
                self._alone[row.id] = feedback[-1].seq
                return True
            why = reason(error)
            if isinstance(error, EarnestError):
                log.error("an update of %s failed: %s", row.name, why)
            state.store.settle({f.seq: ("failed", why) for f in feedback})
            state.bus.publish("learn", row.name, phase="failed", reason=why, feedback=[f.id for f in feedback])
        return True

    def _learn(self, row: AdapterRow, config: LearnConfig, feedback: Sequence[Any]) -> None:
        state = self.state
        found = lessons.gather(state, config, config.build_objective(), feedback)
        if failed := sum(status == "failed" for status, _ in found.others.values()):  # a reason may quote a user
            log.error("%s: %d feedback failed; GET /v1/feedback?adapter=%s has the reason", row.name, failed, row.name)
        if not found.rows:
            state.store.settle(found.others)
            state.bus.publish("learn", row.name, phase="nothing to learn", feedback=[f.id for f in feedback])
            return
        parent, number = row.live, row.next
        started = time.perf_counter()
        self._say(row, "begins", number, feedback=[f.id for f, _ in found.taken])
        name = f"learn {row.id}@{number}"
        with state.host.turn("learn") as turn:
            turn.cancelled = self._cancel.is_set
            try:
                turn.yield_turn()
                engine, teacher, notes = self._engine(name, row, config, turn)
                with state.host.only(engine.adapter):
                    record, verdict, refusal = self._update(row, number, config, engine, teacher, found)
                    record |= {
                        "parent": parent,
                        "notes": notes,
                        "feedback": [f.id for f, _ in found.taken],
                        "data": [
                            {"feedback": f.id, "completion": c.id, "choice": c.choice, "version": c.version}
                            for f, c in found.taken
                        ],
                        "config": clean(config.model_dump(mode="python")),
                        "seconds": round(time.perf_counter() - started, 3),
                    }
                    served = self._write(row, number, engine, record, found)
                record["audit"] = (verdict + Verdict((served,))).to_dict()
                if served.outcome == "fails":
                    refusal = f"{refusal}; {served.meaning}" if refusal else served.meaning
            finally:
                if name in state.host.attached():
                    state.host.detach(name)
        status = state.store.add_version(
            row.id, number, parent, clean(record), [f.seq for f, _ in found.taken], found.others, refusal
        )
        if status is None:
            folder = state.store.version_folder(row.id, number)
            state.leases.forget(row.id, number)
            versions.remove(folder.parent if state.store.adapter_by_id(row.id) is None else folder)
            return
        self.updates += 1
        made = state.store.version(row, number)
        after = "; ".join([f"after {len(found.taken)} feedback, {record['seconds']:.1f} s", *notes])
        if status == "promoted":
            log.info("%s: version %d is live (%s)", row.name, number, after)
        else:
            log.info("%s: version %d is a candidate and not live (%s): %s", row.name, number, after, made.reason)
        facts = {"number": number, "parent": parent, "status": status, "reason": made.reason}
        facts |= {"feedback": record["feedback"], "metrics": clean(record["metrics"]), "answers": record["answers"]}
        state.bus.publish("version", row.name, **facts)

    def _engine(
        self, name: str, row: AdapterRow, config: LearnConfig, turn: Turn
    ) -> tuple[YieldingEngine, Any, list[str]]:
        """A trainable copy of the live version, its teacher, and what does not continue; the version that answers
        stays as it is."""
        made = learning.made_with(self.state.store, row)
        learning.check_adapter(row, made, config)
        how = {"targets": config.adapter.targets, "layers": config.adapter.layers, "seed": config.seed}
        how |= {"modules_to_save": config.adapter.modules_to_save}
        adapter = self.state.host.attach(name, config.adapter.build(), **how)
        if config.teacher.outside:
            raise EarnestError(f"teacher.kind: a server learns with its own policy, not with {config.teacher.kind!r}.")
        if config.teacher.kind != "live" and "teacher" not in config.build_objective().signals():
            raise EarnestError(f"teacher: no term reads the {config.teacher.kind} teacher; add one that does.")
        teacher = config.teacher.build(adapter)
        averages = isinstance(teacher, EMATeacher)
        same = not made or TeacherConfig.model_validate(made["teacher"]) == config.teacher
        engine = YieldingEngine(
            self.state.host.policy,
            adapter,
            config.optimizer.build(),
            outer=teacher if averages and same else None,
            max_grad_norm=config.optimizer.max_grad_norm,
            micro_tokens=config.micro_tokens,
        )
        engine.turn = turn
        notes: list[str] = []
        if row.live > 0:
            folder = self.state.store.version_folder(row.id, row.live) / "engine"
            if not engine_state.load(engine, folder, own_settings=True):
                notes.append("the optimizer's settings changed, so its state starts anew")
        if averages and not same:
            engine.outer = teacher = config.teacher.build(adapter)
            notes.append(f"the teacher's settings changed, so its average starts from version {row.live}'s weights")
        return engine, teacher, notes

    def _update(
        self, row: AdapterRow, number: int, config: LearnConfig, engine: YieldingEngine, teacher: Any, found: Lessons
    ) -> tuple[dict[str, Any], Verdict, str]:
        """(the version's record, the audit's verdict, why it is not to be promoted or '')."""
        objective, turn = config.build_objective(), engine.turn
        ready = []
        for batch, teacher_prompts in lessons.batches(self.state, found.rows):
            batch = with_reference(engine, batch, objective)
            taught = "teacher" in objective.signals()
            ready.append(with_teacher(engine, batch, teacher_prompts, teacher) if taught else batch)
        before = _by_role(engine, ready)
        answers = self._answers(engine, found)
        margin = gate.margin(self.state, engine, config.gate)
        asked = config.gate.model_dump_json()
        if asked not in self._bases:  # the base's answers to the probes never change
            self._bases[asked] = gate.probe(self.state, engine, config.gate, turn.yield_turn, base=True)
        self._say(row, "audit", number)
        with turn.serving("chat"):  # other work would change tensors that the audit watches
            alive = [b for b in ready if len(objective.idle(b)) < len(list(objective.live()))]
            if not alive:
                raise EarnestError(f"nothing to learn: {'; '.join(objective.idle(ready[0]).values())}")
            verdict = prove(engine, objective, alive[0], quick=config.audit == "alive")
        curve: list[dict[str, Any]] = []
        for step in range(config.updates):
            for batch in alive:
                report = engine.step(batch, objective)
                curve.append({"step": step + 1, "loss": report.loss, "update_norm": report.update.update_norm})
                self._say(row, "step", number, step=step + 1, of=config.updates, loss=report.loss)
        self._say(row, "gate", number)
        passed, numbers = gate.judge(self.state, engine, config.gate, self._bases[asked], margin, turn.yield_turn)
        after = _by_role(engine, ready)
        later = self._answers(engine, found)
        record = {
            "metrics": {
                "loss": report.loss,
                "loss_first": curve[0]["loss"],
                "tokens": sum(b.active.shape[0] for b in ready),
                "logprob_before": before,
                "logprob_after": after,
                "gate": numbers,
            },
            "curve": curve,
            "report": clean(report.to_dict()),
            "gate": passed.to_dict(),
            "audit": verdict.to_dict(),
            "answers": [{**a, "after": b["before"]} for a, b in zip(answers, later, strict=True)],
        }
        broken = [f"{f.law} on {f.subject}: {f.measured}, expected {f.expected}" for f in verdict.failures]
        broken += [f"{f.subject} {f.measured}, expected {f.expected}" for f in passed.failures]
        return record, verdict, "; ".join(broken)

    def _answers(self, engine: YieldingEngine, found: Lessons) -> list[dict[str, Any]]:
        """The most likely answers to the first prompts that the feedback is about."""
        shown = list({c.prompt: (f, c) for f, c in reversed(found.taken)}.values())[-SHOWN:][::-1]
        lengths = [min(ANSWER, len(c.tokens) + 8) for _, c in shown]
        specs = [SampleSpec(temperature=0.0, max_new_tokens=length) for length in lengths]
        requests = [Request(c.prompt, spec, engine.adapter) for (_, c), spec in zip(shown, specs, strict=True)]
        return [
            {
                "feedback": f.id,
                "completion": c.id,
                "prompt": c.messages[-1]["content"] if c.messages else self.state.text.decode(c.prompt),
                "given": c.text,
                "said": f.text or f.better or f"thumbs {f.thumbs}",
                "before": self.state.text.decode(done.tokens),
            }
            for (f, c), (done,) in zip(shown, decode(self.state.host, requests, engine.turn.yield_turn), strict=True)
        ]

    def _write(
        self, row: AdapterRow, number: int, engine: YieldingEngine, record: Mapping[str, Any], found: Lessons
    ) -> Finding:
        """Write the version's folder, then check law SV: the log-probs of the served adapter equal the trained one's
        bit for bit."""
        state = self.state
        folder = state.store.version_folder(row.id, number)

        def fill(fresh: Path) -> None:
            engine.adapter.save(fresh / "adapter", base_model=state.host.policy.name)
            engine.save(fresh / "engine")

        versions.write(folder, fill, clean(record))
        state.leases.forget(row.id, number)  # an earlier attempt may have ended before its commit
        batch = lessons.batches(state, found.rows)[0][0]
        trained = engine.scalars(batch, [LogProb()])[LogProb()].values
        with state.leases.checked(row.id, number) as adapter, state.host.only(adapter):
            served = engine.scalars(batch, [LogProb()])[LogProb()].values
        off = float((served - trained).abs().max())
        return Finding(
            "SV",
            f"version {number} as it is served",
            f"log-probs off by {off:.3g}",
            "0",
            "holds" if off == 0.0 else "fails",
            "The adapter that was read back from disk answers differently from the one that was trained.",
        )

    def _say(self, row: AdapterRow, phase: str, number: int, **more: Any) -> None:
        self.doing = {"adapter": row.name, "version": number, "phase": phase, **more}
        self.state.bus.publish("learn", row.name, version=number, phase=phase, **more)


@torch.no_grad()
def _by_role(engine: LocalEngine, batches: Sequence[Batch]) -> dict[str, float]:
    """The mean log-prob per token, for each role in the batches."""
    sums: dict[str, list[float]] = {}
    for batch in batches:
        values = engine.scalars(batch, [LogProb()])[LogProb()].values
        for role in sorted(set(batch.role)):
            own = values[batch.has_role([role])[batch.row]]
            total = sums.setdefault(role, [0.0, 0.0])
            total[0], total[1] = total[0] + float(own.sum()), total[1] + len(own)
    return {role: total / count for role, (total, count) in sums.items()}
