"""Traces into pairs: read → plan → ask the teachers → judge → pair → clean → write.

The plan, and so the order of everything that is written, is (trace, turn, teacher, sample); the order of the replies
does not matter. Answers and verdicts go into a journal as they arrive. A second call of ``replay`` with the same
settings continues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from earnest.replay import judges
from earnest.replay.clean import Cleaned, backend_of, clean
from earnest.replay.costs import CostLedger
from earnest.replay.endpoint import Endpoint, RetriesExhausted
from earnest.replay.errors import ReplayError
from earnest.replay.journal import Journal, Kind
from earnest.replay.leakage import Leakage, heldout_texts
from earnest.replay.local import CHUNK, LocalPolicy, UnusableTurn
from earnest.replay.pairs import Pair, write
from earnest.replay.settings import ReplayConfig, SpeakerConfig, TeacherEntry
from earnest.replay.traces import AssistantTurn, Traces, meaning, parse, plain_text, read

Progress = Callable[[str, int, int], None]
SAME, TIE, FAILED = "the teacher gave the same answer", "a tie", "the endpoint failed every time"


@dataclass(frozen=True)
class Ask:
    turn: AssistantTurn
    teacher: TeacherEntry
    sample: int

    @property
    def key(self) -> str:
        return f"{self.turn.key}|{self.teacher.label}|{self.sample}"


@dataclass(frozen=True)
class Drop:
    """An answer that became no pair."""

    reason: str
    trace: str
    turn: int
    teacher: str
    text: str


@dataclass(frozen=True)
class Replayed:
    """The result. ``made`` are the pairs before cleaning."""

    path: Path
    traces: Traces
    turns: int
    asked: int
    made: tuple[Pair, ...]
    drops: tuple[Drop, ...]
    cleaned: Cleaned
    ledger: CostLedger


@dataclass
class _Job:
    config: ReplayConfig
    journal: Journal
    ledger: CostLedger
    progress: Progress
    _policies: dict[tuple[str, str | None], LocalPolicy] = field(default_factory=dict)

    def policy(self, who: SpeakerConfig) -> LocalPolicy:
        key = (who.model, who.adapter)
        if key not in self._policies:
            self.progress(f"loading {who.model}", 0, 0)
            self._policies[key] = LocalPolicy(*key)
        return self._policies[key]

    def endpoint(self, who: SpeakerConfig) -> Endpoint:
        assert who.base_url is not None, "the config demands it"
        c = self.config
        return Endpoint(who.base_url, who.model, who.key, c.attempts, c.backoff, c.timeout)

    def requests(self, kind: Kind, name: str, asks: Sequence[Ask], one: Callable[[Ask], dict[str, Any]]) -> None:
        """Send every request that the journal lacks to an endpoint, ``concurrency`` at a time.

        A request that fails every time is left for another session; too many of them stop the job.
        """
        todo = [ask for ask in asks if self.journal.get(kind, ask.key) is None]
        allowed = int(self.config.max_errors * len(asks))
        done = len(asks) - len(todo)
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            waiting: dict[Future[dict[str, Any]], Ask] = {}
            rest, failed = iter(todo), 0
            try:
                while True:
                    for ask in islice(rest, self.config.concurrency - len(waiting)):
                        self.ledger.demand_budget(self.config.max_cost)
                        waiting[pool.submit(one, ask)] = ask
                    if not waiting:
                        break
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        ask = waiting.pop(future)
                        try:
                            record = self.journal.add(kind, ask.key, **future.result())
                            self.ledger.count(kind, name, record["usage"])
                        except RetriesExhausted as error:
                            failed += 1
                            if failed > allowed:
                                raise ReplayError(
                                    f"{failed} of {len(asks)} requests failed for good, more than the share "
                                    f"max_errors={self.config.max_errors:g} allows. {error} The answers are kept "
                                    f"in {self.journal.path}: the same command continues from there."
                                ) from None
                        done += 1
                        self.progress(f"{kind}s of {name}", done, len(asks))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def replay(traces: Path, config: ReplayConfig, progress: Progress = lambda *_: None) -> Replayed:
    """Make ``config.out``, or raise and keep the answers so far."""
    found = read(traces, drop_bad=config.bad_lines == "drop")
    turns = [turn for trace in found.traces for turn in trace.turns() if config.turns == "all" or turn.last]
    asks = [
        Ask(turn, teacher, sample) for turn in turns for teacher in config.teachers for sample in range(teacher.samples)
    ]
    out = Path(config.out)
    journal = Journal(out.with_name(f"{out.name}.journal.jsonl"), config.asking(), found.sha256)
    try:
        ledger = CostLedger.of(config, journal)
        job = _Job(config, journal, ledger, progress)
        for teacher in config.teachers:
            _teach(job, teacher, [ask for ask in asks if ask.teacher is teacher])
        _judge(job, [ask for ask in asks if _message(journal, ask) is not None and not _same(journal, ask)])
    finally:
        journal.close()
    pairs, drops = _pair(job, asks)
    if not pairs:
        reasons = ", ".join(f"{n} × {why}" for why, n in count(drops).items())
        raise ReplayError(f"none of {len(asks)} answers became a pair: {reasons}. Nothing was written.")
    leakage = config.leakage
    held = None if leakage is None else Leakage.of(heldout_texts(leakage.heldout), leakage.n, leakage.max)
    progress("cleaning", 0, 0)
    cleaned = clean(pairs, [f.build() for f in config.clean], backend_of(config.cleaner), held)
    about = {"traces": str(traces), **config.model_dump(mode="json"), "backend": cleaned.backend}
    write(out, cleaned.pairs, about)
    return Replayed(out, found, len(turns), len(asks), tuple(pairs), tuple(drops), cleaned, ledger)


def _teach(job: _Job, teacher: TeacherEntry, asks: Sequence[Ask]) -> None:
    if teacher.kind == "endpoint":
        endpoint = job.endpoint(teacher)

        def one(ask: Ask) -> dict[str, Any]:
            reply = endpoint.chat(
                ask.turn.state,
                name=ask.key,
                temperature=teacher.temperature,
                max_tokens=teacher.max_tokens,
                tools=ask.turn.trace.tools,
                seed=job.config.seed + ask.sample,
            )
            if reply.finish == "length":
                return {"message": None, "why": f"cut off at {teacher.max_tokens} tokens", "usage": reply.usage}
            try:  # the same rules as for a trace: an answer that cannot be read cannot be trained on
                message = parse({"id": "answer", "messages": [*ask.turn.state, reply.message]}).messages[-1]
            except ValueError as error:
                return {"message": None, "why": f"the endpoint's answer is malformed: {error}", "usage": reply.usage}
            return {"message": dict(message), "why": "", "usage": reply.usage}

        job.requests("answer", teacher.label, asks, one)
        return
    if teacher.kind == "user":
        for ask in asks:
            better = ask.turn.trace.meta.get("better") if ask.turn.last else None
            message = {"role": "assistant", "content": better} if isinstance(better, str) and better.strip() else None
            job.journal.add("answer", ask.key, message=message, why="" if message else "no user gave a better answer")
        return
    policy = None
    for start in range(0, len(asks), CHUNK * teacher.samples):
        part = asks[start : start + CHUNK * teacher.samples]
        if all(job.journal.get("answer", ask.key) is not None for ask in part):
            continue
        policy = policy or job.policy(teacher)
        _sample(job, teacher, policy, part)
        job.progress(f"answers of {teacher.label}", min(start + len(part), len(asks)), len(asks))


def _sample(job: _Job, teacher: TeacherEntry, policy: LocalPolicy, part: Sequence[Ask]) -> None:
    firsts = [ask for ask in part if ask.sample == 0]
    prompts: list[list[int]] = []
    usable: list[Ask] = []
    for ask in firsts:
        try:
            prompts.append(policy.prompt(ask.turn, teacher.kind == "hindsight", teacher.max_tokens))
            usable.append(ask)
        except UnusableTurn as reason:
            for sample in range(teacher.samples):
                key = Ask(ask.turn, teacher, sample).key
                job.journal.add("answer", key, message=None, why=str(reason))
    if not prompts:
        return
    how, tools = (teacher.samples, teacher.temperature, teacher.max_tokens), [ask.turn.trace.tools for ask in usable]
    found = policy.answer(prompts, *how, job.config.seed, tools)
    for ask, answers in zip(usable, found, strict=True):
        for sample, a in enumerate(answers):
            key = Ask(ask.turn, teacher, sample).key
            message = None if a.message is None else dict(a.message)
            record = job.journal.add("answer", key, a.usage, message=message, why=a.why)
            job.ledger.count("answer", teacher.label, record["usage"])


def _judge(job: _Job, asks: Sequence[Ask]) -> None:
    judge = job.config.judge
    compared = {ask.key: judges.AnswerComparison(ask.turn, _message(job.journal, ask) or {}) for ask in asks}
    if judge.kind == "endpoint":
        endpoint = job.endpoint(judge)

        def one(ask: Ask) -> dict[str, Any]:
            verdict, usage = judges.by_endpoint(endpoint, compared[ask.key], ask.key)
            return {**_noted(verdict), "usage": usage}

        job.requests("verdict", "judge", asks, one)
        return
    todo = [ask for ask in asks if job.journal.get("verdict", ask.key) is None]
    for start in range(0, len(todo), CHUNK):
        part = todo[start : start + CHUNK]
        for ask, verdict in zip(part, _verdicts(job, [compared[ask.key] for ask in part]), strict=True):
            job.journal.add("verdict", ask.key, **_noted(verdict))
        job.progress("verdicts", start + len(part), len(todo))


def _noted(verdict: float | str) -> dict[str, Any]:
    """A verdict as the journal has it: a margin, or why there is none."""
    return {"margin": None, "why": verdict} if isinstance(verdict, str) else {"margin": verdict, "why": ""}


def _verdicts(job: _Job, asked: Sequence[judges.AnswerComparison]) -> list[float | str]:
    judge = job.config.judge
    if judge.kind == "likelihood":
        return judges.by_likelihood(job.policy(judge), asked)
    if judge.kind == "teacher":
        return [1.0 for _ in asked]
    found: list[float | str] = []
    for comparison in asked:
        try:
            found.append(judges.by_grader(comparison, judge.task))
        except UnusableTurn as reason:
            found.append(str(reason))
    return found


def _pair(job: _Job, asks: Sequence[Ask]) -> tuple[list[Pair], list[Drop]]:
    """A pair, or a reason, for every ask."""
    pairs: list[Pair] = []
    drops: list[Drop] = []
    for ask in asks:
        made = _one(job, ask)
        if isinstance(made, Pair):
            pairs.append(made)
        else:
            text = plain_text(_message(job.journal, ask) or ask.turn.answer)
            drops.append(Drop(made, ask.turn.trace.id, ask.turn.number, ask.teacher.label, text))
    return pairs, drops


def _one(job: _Job, ask: Ask) -> Pair | str:
    answer = job.journal.get("answer", ask.key)
    if answer is None:
        return FAILED
    if answer["message"] is None:
        return str(answer["why"])
    if _same(job.journal, ask):
        return SAME
    verdict = job.journal.get("verdict", ask.key)
    if verdict is None:
        return FAILED
    if verdict["margin"] is None:
        return str(verdict["why"])
    margin = float(verdict["margin"])
    if abs(margin) <= job.config.min_margin:
        return TIE if margin == 0 else f"a margin of at most {job.config.min_margin:g}"
    trace = ask.turn.trace
    better, worse = (answer["message"], ask.turn.answer) if margin > 0 else (ask.turn.answer, answer["message"])
    return Pair(
        trace=trace.id,
        turn=ask.turn.number,
        teacher=ask.teacher.label,
        sample=ask.sample,
        margin=abs(margin),
        judge=job.config.judge.kind,
        winner="teacher" if margin > 0 else "trace",
        prompt=ask.turn.state,
        chosen=better,
        rejected=worse,
        tools=trace.tools,
        teacher_model="" if ask.teacher.kind == "user" else ask.teacher.model,
        completion_id=trace.completion_id,
        model=trace.model,
        version=None if trace.version is None else str(trace.version),
    )


def _message(journal: Journal, ask: Ask) -> dict[str, Any] | None:
    record = journal.get("answer", ask.key)
    return None if record is None else record["message"]


def _same(journal: Journal, ask: Ask) -> bool:
    message = _message(journal, ask)
    return message is not None and meaning(message) == meaning(ask.turn.answer)


def count(drops: Iterable[Drop]) -> dict[str, int]:
    """The count of each reason, the most frequent first."""
    return dict(sorted(Counter(drop.reason for drop in drops).items(), key=lambda item: (-item[1], item[0])))
