"""A run folder into a ``Run``: strict about what is there, honest about what is not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from earnest.report.fields import Decoder, Fields, lines, read_text
from earnest.report.record import (
    FORMAT,
    Check,
    Evaluation,
    Event,
    Header,
    Level,
    Message,
    Outcome,
    Phase,
    ReportError,
    Run,
    Sample,
    Status,
    Step,
    TermValue,
    TrainReward,
    Verdict,
)

STATUSES: tuple[Status, ...] = ("running", "finished", "interrupted", "failed")
PHASES: tuple[Phase, ...] = ("before", "after", "train")
OUTCOMES: tuple[Outcome, ...] = ("holds", "fails", "not declared")

Line = TypeVar("Line", Step, Evaluation)


def load(run_dir: str | Path) -> Run:
    """Read ``run_dir``; ``ReportError`` where it is no run folder, or where a file contradicts docs/run-folder.md."""
    folder = Path(run_dir)
    decoder = Decoder()
    gaps: list[str] = []
    header = _header(folder, decoder)
    steps, evaluations = _metrics(folder, decoder, gaps)
    samples = _samples(folder, decoder, gaps)
    verdict = _verdict(folder, decoder, gaps)
    config = read_text(folder / "config.yaml")
    if config is None:
        gaps.append("There is no config.yaml: the settings of this run are not known.")
    environment = _environment(folder, decoder, gaps)
    if decoder.nonfinite:
        gaps.append(f"{decoder.nonfinite} numbers were NaN or infinite; they are shown as gaps.")
    run = Run(folder, header, steps, evaluations, samples, verdict, _events(folder), config, environment, ())
    return replace(run, gaps=(*_unfinished(run), *gaps))


def _header(folder: Path, decoder: Decoder) -> Header:
    if not folder.exists():
        raise ReportError(
            f"{folder}: there is no such folder; give the folder that `earnest run` printed, e.g. runs/quickstart-…."
        )
    if not folder.is_dir():
        raise ReportError(f"{folder} is a file; give the run folder that holds it.")
    text = read_text(folder / "run.json")
    if text is None:
        state = "is empty" if not any(folder.iterdir()) else "is no run folder: it has no run.json"
        nested = sorted(path.parent.name for path in folder.glob("*/run.json"))
        hint = f"Runs inside it: {', '.join(nested[:5])}." if nested else "Give the folder that `earnest run` printed."
        raise ReportError(f"{folder} {state}. {hint}")
    data = decoder.parse(text, "run.json")
    if data.data.get("format") != FORMAT:
        raise ReportError(
            f"run.json: the format is {data.data.get('format')!r}; this version of earnest reads {FORMAT!r}."
        )
    model = data.inner("model")
    return Header(
        recipe=data.text("recipe"),
        task=data.text("task"),
        model=model.text("name"),
        model_version=model.text_or_none("version") or "",
        adapter=data.text_or_none("adapter"),
        objective=data.text("objective"),
        seed=data.integer("seed"),
        steps=data.integer("steps"),
        status=data.word("status", STATUSES),
        reason=data.text_or_none("reason"),
        started=data.text("started"),
        updated=data.text("updated"),
        steps_done=data.integer("steps_done"),
        seconds=data.number("seconds"),
    )


def _metrics(folder: Path, decoder: Decoder, gaps: list[str]) -> tuple[tuple[Step, ...], tuple[Evaluation, ...]]:
    steps: list[Step] = []
    evaluations: list[Evaluation] = []
    for line in lines(read_text(folder / "metrics.jsonl") or "", "metrics.jsonl", decoder, gaps):
        if line.word("kind", ("step", "eval")) == "step":
            steps.append(_step(line))
        else:
            evaluations.append(_evaluation(line))
    return _in_order(steps, "step", gaps), _in_order(evaluations, "evaluation", gaps)


def _in_order(entries: Iterable[Line], kind: str, gaps: list[str]) -> tuple[Line, ...]:
    """Steps rise strictly. Where one comes twice the later line counts, and that is said."""
    table: dict[int, Line] = {}
    again = 0
    for entry in entries:
        again += entry.step in table
        table[entry.step] = entry
    if again:
        gaps.append(f"metrics.jsonl has {again} {kind} lines twice; the later line counts.")
    return tuple(table[step] for step in sorted(table))


def _step(line: Fields) -> Step:
    reward, idle = line.inner_or_none("reward"), line.inner_or_none("idle")
    terms = line.inner("terms")
    return Step(
        step=line.integer("step"),
        version=line.integer("version"),
        reward=None if reward is None else _reward(reward),
        loss=line.number_or_none("loss"),
        terms={label: _term(terms.inner(label)) for label in terms.data},
        skipped=line.texts("skipped"),
        idle={} if idle is None else {label: idle.text(label) for label in idle.data},
        grad_norm=line.number_or_none("grad_norm"),
        update_norm=line.number_or_none("update_norm"),
        lr=line.number_or_none("lr"),
        passes=line.text_or_none("passes"),
        micro_batches=line.integer_or_none("micro_batches"),
        metrics=line.numbers("metrics"),
        seconds=line.numbers("seconds"),
    )


def _reward(reward: Fields) -> TrainReward:
    return TrainReward(reward.number_or_none("mean"), reward.number_or_none("sd"), reward.integer("n"))


def _term(term: Fields) -> TermValue:
    return TermValue(
        ran=term.text("ran"),
        weight=term.number("weight"),
        loss=term.number_or_none("loss"),
        share=term.number_or_none("share"),
        metrics=term.numbers("metrics"),
    )


def _evaluation(line: Fields) -> Evaluation:
    return Evaluation(
        step=line.integer("step"),
        version=line.integer("version"),
        reward=line.number_or_none("reward"),
        se=line.number_or_none("se"),
        prompts=line.integer("prompts"),
        n=line.integer("n"),
        correct=line.number_or_none("correct"),
        means=line.list_of_numbers("means"),
    )


def _samples(folder: Path, decoder: Decoder, gaps: list[str]) -> tuple[Sample, ...]:
    text = read_text(folder / "samples.jsonl") or ""
    return tuple(
        Sample(
            phase=line.word("phase", PHASES),
            step=line.integer("step"),
            version=line.integer("version"),
            prompt_id=line.text("prompt_id"),
            sample=line.integer("sample"),
            prompt=tuple(_message(message) for message in line.items("prompt")),
            completion=line.text("completion"),
            reward=line.number_or_none("reward"),
            correct=line.flag_or_none("correct"),
            feedback=line.text_or_none("feedback") or "",
            tokens=line.integer_or_none("tokens"),
        )
        for line in lines(text, "samples.jsonl", decoder, gaps)
    )


def _message(message: Fields) -> Message:
    """A message's text; what else it carries (a tool call) follows as JSON, so that a prompt is shown whole."""
    rest = {key: value for key, value in message.data.items() if key not in ("role", "content") and value is not None}
    parts = (message.text_or_none("content"), json.dumps(rest, ensure_ascii=False) if rest else None)
    return Message(message.text("role"), "\n".join(part for part in parts if part))


def _verdict(folder: Path, decoder: Decoder, gaps: list[str]) -> Verdict | None:
    text = read_text(folder / "verdict.json")
    if text is None:
        return None
    data = decoder.parse(text, "verdict.json")
    checks = tuple(
        Check(
            law=check.text("law"),
            subject=check.text("subject"),
            measured=_measured(check),
            expected=check.text("expected"),
            outcome=check.word("outcome", OUTCOMES),
            detail=check.text_or_none("detail") or "",
        )
        for check in data.items("checks")
    )
    left_out = data.integer_or_none("not_applicable") or 0
    verdict = Verdict(checks, data.integer("step"), data.number_or_none("seconds"), left_out)
    said = data.flag_or_none("holds")
    if said is not verdict.holds:
        gaps.append(
            f"verdict.json says that holds is {said}, but {verdict.count('holds')} of its checks hold and "
            f"{verdict.count('fails')} fail; the checks count."
        )
    return verdict


def _measured(check: Fields) -> float | str | None:
    return check.text("measured") if isinstance(check.data.get("measured"), str) else check.number_or_none("measured")


def _environment(folder: Path, decoder: Decoder, gaps: list[str]) -> dict[str, Any] | None:
    text = read_text(folder / "environment.json")
    if text is None:
        gaps.append("There is no environment.json: versions and machine are not known.")
        return None
    return dict(decoder.parse(text, "environment.json").data)


def _events(folder: Path) -> tuple[Event, ...]:
    """events.log is prose for people: a line of another form is kept whole, as information."""
    levels: dict[str, Level] = {"info": "info", "warning": "warning", "error": "error"}
    events: list[Event] = []
    for line in (read_text(folder / "events.log") or "").splitlines():
        parts = line.split(" ", 2)
        if len(parts) == 3 and parts[1] in levels:
            events.append(Event(parts[0], levels[parts[1]], parts[2]))
        elif line.strip():
            events.append(Event("", "info", line))
    return tuple(events)


def _unfinished(run: Run) -> list[str]:
    """What an unfinished run has not got to, one sentence each."""
    header, gaps = run.header, []
    done = f"{header.steps_done} of {header.steps} steps"
    first = header.reason.strip().splitlines()[0].rstrip(" .:") if header.reason and header.reason.strip() else ""
    why = f" ({first})" if first else ""
    if header.status == "interrupted":
        gaps.append(f"The run was interrupted after {done}{why}; it can be resumed.")
    elif header.status == "failed":
        gaps.append(f"The run failed after {done}{why}.")
    elif header.status == "running":
        gaps.append(f"The run is still going, or was killed: {done} when it last wrote.")
    if not run.steps:
        gaps.append("No step is recorded yet.")
    if not run.evaluations:
        gaps.append("No held-out evaluation is recorded.")
    elif run.change is None:
        gaps.append("There is one held-out evaluation only, so no before and after.")
    phases = {sample.phase for sample in run.samples}
    missing = [phase for phase in ("before", "after") if phase not in phases]
    if missing:
        gaps.append(f"No samples {' and '.join(missing)} training are recorded.")
    if run.verdict is None:
        gaps.append("There is no verdict yet: the step of this run has not been checked.")
    elif not run.verdict.checks:
        gaps.append("The verdict is empty: nothing was checked.")
    return gaps
