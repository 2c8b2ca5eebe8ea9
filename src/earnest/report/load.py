"""Reads a run folder into a ``Run``. A wrong value raises; a missing file or an incomplete last line is a sentence in
``gaps``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from earnest.report.record import (
    FORMAT,
    EvalRecord,
    EventRecord,
    Record,
    ReportError,
    Run,
    RunRecord,
    SampleRecord,
    StepRecord,
    VerdictRecord,
)

Kind = TypeVar("Kind", bound=Record)
Line = TypeVar("Line", StepRecord, EvalRecord)


def load(run_dir: str | Path) -> Run:
    """Read ``run_dir``; ``ReportError`` if it is not a run folder, or if a file does not follow docs/run-folder.md."""
    return _Reader(Path(run_dir)).run()


def record(model: type[Kind], data: dict[str, Any], where: str) -> Kind:
    """``data`` as a record of this model, or one sentence that names the file, the line, the field and the value."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        from earnest.config.explain import sentence  # imports torch

        raise ReportError(f"{where} does not follow docs/run-folder.md: {sentence(error, model)}") from error


class _Reader:
    """One folder being read: ``gaps`` are the sentences so far, ``nonfinite`` counts NaN and Infinity. JSON has
    neither, but Python's json writes them; they are read as null."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gaps: list[str] = []
        self.nonfinite = 0
        self._json = json.JSONDecoder(parse_constant=self._constant)

    def run(self) -> Run:
        header = self._header()
        steps, evaluations = self._metrics()
        samples = tuple(record(SampleRecord, line, where) for line, where in self._lines("samples.jsonl"))
        verdict = self._verdict()
        config = self._text("config.yaml")
        if config is None:
            self.gaps.append("There is no config.yaml: the settings of this run are not known.")
        environment = self._object("environment.json")
        if environment is None:
            self.gaps.append("There is no environment.json: versions and machine are not known.")
        if self.nonfinite:
            self.gaps.append(f"{self.nonfinite} numbers were NaN or infinite; they are shown as gaps.")
        events = tuple(_event(line) for line in (self._text("events.log") or "").splitlines() if line.strip())
        run = Run(self.folder, header, steps, evaluations, samples, verdict, events, config, environment, ())
        return replace(run, gaps=(*_unfinished(run), *self.gaps))

    def _header(self) -> RunRecord:
        folder = self.folder
        if not folder.exists():
            raise ReportError(
                f"{folder}: there is no such folder; give the folder that `earnest run` printed, e.g. "
                "runs/quickstart-…."
            )
        if not folder.is_dir():
            raise ReportError(f"{folder} is a file; give the run folder that holds it.")
        data = self._object("run.json")
        if data is None:
            state = "is empty" if not any(folder.iterdir()) else "is no run folder: it has no run.json"
            nested = sorted(path.parent.name for path in folder.glob("*/run.json"))
            hint = (
                f"Runs inside it: {', '.join(nested[:5])}." if nested else "Give the folder that `earnest run` printed."
            )
            raise ReportError(f"{folder} {state}. {hint}")
        if data.get("format") != FORMAT:
            raise ReportError(
                f"run.json: the format is {data.get('format')!r}; this version of earnest reads {FORMAT!r}."
            )
        return record(RunRecord, data, "run.json")

    def _metrics(self) -> tuple[tuple[StepRecord, ...], tuple[EvalRecord, ...]]:
        steps: list[StepRecord] = []
        evaluations: list[EvalRecord] = []
        for line, where in self._lines("metrics.jsonl"):
            if line.get("kind") == "step":
                steps.append(record(StepRecord, line, where))
            elif line.get("kind") == "eval":
                evaluations.append(record(EvalRecord, line, where))
            else:
                raise ReportError(f"{where}: kind: must be 'step' or 'eval', got {_short(line.get('kind'))}.")
        return self._in_order(steps, "step"), self._in_order(evaluations, "evaluation")

    def _in_order(self, entries: Iterable[Line], kind: str) -> tuple[Line, ...]:
        """The lines by increasing step. If a step has two lines, the later one counts, and ``gaps`` mentions it."""
        table: dict[int, Line] = {}
        again = 0
        for entry in entries:
            again += entry.step in table
            table[entry.step] = entry
        if again:
            self.gaps.append(f"metrics.jsonl has {again} {kind} lines twice; the later line counts.")
        return tuple(table[step] for step in sorted(table))

    def _verdict(self) -> VerdictRecord | None:
        data = self._object("verdict.json")
        if data is None:
            return None
        verdict = record(VerdictRecord, data, "verdict.json")
        if data.get("holds") is not verdict.holds:
            self.gaps.append(
                f"verdict.json has holds = {_short(data.get('holds'))}, but {verdict.count('holds')} of its checks "
                f"hold and {verdict.count('fails')} fail; the checks count."
            )
        return verdict

    def _text(self, name: str) -> str | None:
        """The file's text, or None if there is no such file."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise ReportError(f"{name}: not UTF-8 (byte {error.start}); repair or remove it.") from error
        except OSError as error:
            raise ReportError(f"{name}: cannot be read ({error.strerror}).") from error

    def _object(self, name: str) -> dict[str, Any] | None:
        text = self._text(name)
        return None if text is None else self._parse(text, name)

    def _lines(self, name: str) -> Iterator[tuple[dict[str, Any], str]]:
        """(object, where) per line. An incomplete last line (the run was killed) is left out and mentioned in ``gaps``;
        any other bad line raises."""
        *whole, rest = (self._text(name) or "").split("\n")
        for number, row in enumerate(whole, start=1):
            if row.strip():
                where = f"{name}, line {number}"
                yield self._parse(row, where), where
        if rest.strip():
            where = f"{name}, line {len(whole) + 1}"
            try:
                yield self._parse(rest, where), where
            except ReportError:
                self.gaps.append(
                    f"The last line of {name} is torn (the run was killed while writing it) and is left out."
                )

    def _parse(self, text: str, where: str) -> dict[str, Any]:
        try:
            data = self._json.decode(text)
        except ValueError as error:
            raise ReportError(f"{where}: not JSON ({error}); repair or remove it.") from error
        if not isinstance(data, dict):
            raise ReportError(f"{where}: must be a JSON object, got {_short(data)}.")
        return data

    def _constant(self, _: str) -> None:
        self.nonfinite += 1


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _event(line: str) -> EventRecord:
    """A line of events.log; a line of another form is kept whole, as information."""
    parts = line.split(" ", 2)
    if len(parts) == 3 and parts[1] in ("info", "warning", "error"):
        return EventRecord.model_validate(dict(zip(("time", "level", "text"), parts, strict=True)))
    return EventRecord(time="", level="info", text=line)


def _unfinished(run: Run) -> list[str]:
    """One sentence for each thing that an unfinished run does not have yet."""
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
    if run.verdict is None and header.status == "finished":
        gaps.append("The step was not checked (check=false).")
    elif run.verdict is None:
        gaps.append("There is no verdict yet: the step of this run has not been checked.")
    elif not run.verdict.checks:
        gaps.append("The verdict is empty: nothing was checked.")
    return gaps
