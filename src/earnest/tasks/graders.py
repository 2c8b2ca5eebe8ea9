"""Graders: functions of a row and a completion. The value of ``grade:`` in a recipe.

    exact                  the completion is the answer, apart from white space at its ends
    numeric                the last number of the completion is the last number of the answer
    math                   the completion and the answer are the same mathematical value (math-verify)
    contains               the answer stands in the completion as a whole word
    regex                  the pattern is found; its first group, where it has one, is the answer
    json                   the completion is JSON that fits a schema, or that equals the answer
    judge                  a chat model's score by a rubric (``model_graders``)
    reward_model           a sequence classifier's score (``model_graders``)
    my_rewards.py:score    a function of the row and the completion that returns a number or a ``Grade``

Each may be a mapping with ``kind``, ``weight`` and its settings. A list of graders is their weighted sum.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from earnest import plugins
from earnest.errors import ConfigError, MissingExtra, nearest
from earnest.settings import Checked, FieldProblem, make, setting
from earnest.tasks.base import Extra, Grade
from earnest.tasks.model_graders import Judge, RewardModel
from earnest.tasks.processes import isolated

Row = Mapping[str, Any]


class Grader(Protocol):
    """Grades a completion of a row's prompt; the row has every column of its file."""

    def __call__(self, row: Row, completion: str) -> Grade: ...


def needs_answer(grader: Grader) -> bool:
    """Whether it compares with the row's answer; a user's own function may do without."""
    if isinstance(grader, WeightedSum):
        return any(needs_answer(part) for _, _, part in grader.parts)
    grader = grader.grader if isinstance(grader, InProcess) else grader
    if isinstance(grader, Regex):
        return re.compile(grader.pattern).groups > 0
    return isinstance(grader, Exact | Numeric | Math | Contains) or (isinstance(grader, Json) and not grader.schema)


def as_grade(found: object) -> Grade:
    """What a user's function returned, as a ``Grade``. A number of at least 1 (or True) counts as correct."""
    if isinstance(found, Grade):
        return found
    if not isinstance(found, numbers.Real):
        raise TypeError(f"the grader returned {found!r}, a {type(found).__name__}; return a number or a Grade")
    reward = float(found)
    return Grade(reward, "", reward >= 1.0)


def _verdict(correct: bool, feedback: str) -> Grade:
    return Grade(float(correct), "" if correct else feedback, correct)


@dataclass(frozen=True, kw_only=True)
class Exact(Checked):
    """Credit for the answer alone."""

    kind: ClassVar[str] = "exact"
    ignore_case: bool = setting(False, "whether upper and lower case are the same")

    def __call__(self, row: Row, completion: str) -> Grade:
        given, wanted = completion.strip(), str(row["answer"]).strip()
        if self.ignore_case:
            given, wanted = given.casefold(), wanted.casefold()
        return _verdict(given == wanted, "The answer is not right.")


_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d*|\.\d+|(?<=\d))(?:[eE][-+]?\d+)?")


def last_number(text: str) -> float | None:
    """The last number of a text; commas may stand between thousands."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return float(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True, kw_only=True)
class Numeric(Checked):
    """Credit for the right number at the end of the completion."""

    kind: ClassVar[str] = "numeric"
    tolerance: float = setting(1e-6, "the largest difference, as a share of the larger number", at_least=0.0)

    def __call__(self, row: Row, completion: str) -> Grade:
        wanted, given = last_number(str(row["answer"])), last_number(completion)
        if wanted is None:
            raise ValueError(f"the answer {row['answer']!r} has no number")
        if given is None:
            return _verdict(False, "The answer has no number.")
        return _verdict(math.isclose(given, wanted, rel_tol=self.tolerance, abs_tol=1e-12), "The number is not right.")


@dataclass(frozen=True, kw_only=True)
class Math(Checked):
    """Credit for an expression of the same value, by math-verify."""

    kind: ClassVar[str] = "math"

    def validate(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtra("math-verify", "graders", "grade: math")

    def __call__(self, row: Row, completion: str) -> Grade:
        import math_verify

        # Its own time limits are signals, which only the main thread has; every grader here has a time limit anyway.
        wanted = math_verify.parse(str(row["answer"]), parsing_timeout=None)
        if not wanted:
            raise ValueError(f"math-verify reads no value in the answer {row['answer']!r}")
        given = math_verify.parse(completion, parsing_timeout=None)
        same = bool(given) and math_verify.verify(wanted, given, timeout_seconds=None)
        return _verdict(same, "The answer is not right." if given else "The answer has no mathematical value.")


@dataclass(frozen=True, kw_only=True)
class Contains(Checked):
    """Credit for a completion in which the answer stands as a whole word."""

    kind: ClassVar[str] = "contains"
    ignore_case: bool = setting(True, "whether upper and lower case are the same")

    def __call__(self, row: Row, completion: str) -> Grade:
        wanted = re.escape(str(row["answer"]).strip())
        if not wanted:
            raise ValueError("the answer is empty, and every completion contains it")
        found = re.search(rf"(?<!\w){wanted}(?!\w)", completion, re.IGNORECASE if self.ignore_case else 0)
        return _verdict(found is not None, "The answer is not in it.")


@dataclass(frozen=True, kw_only=True)
class Regex(Checked):
    """Credit where the pattern is found; its first group, where it has one, must be the answer."""

    kind: ClassVar[str] = "regex"
    pattern: str = setting(doc="a regular expression of Python; a group in it is compared with the answer")

    def validate(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"grade.pattern: {self.pattern!r} is no regular expression: {error}.") from None

    def __call__(self, row: Row, completion: str) -> Grade:
        found = re.search(self.pattern, completion, re.DOTALL)
        if found is None:
            return _verdict(False, f"The answer does not have the form {self.pattern}.")
        same = not found.re.groups or (found.group(1) or "").strip() == str(row["answer"]).strip()
        return _verdict(same, "The answer is not right.")


@dataclass(frozen=True, kw_only=True)
class Json(Checked):
    """Credit for JSON that fits the schema; without a schema, for JSON that equals the answer."""

    kind: ClassVar[str] = "json"
    schema: str | None = setting(None, "a file with a JSON schema; none: the completion has to equal the answer")

    def validate(self) -> None:
        if self.schema is not None:
            self.schema_errors({})  # a wrong schema is refused before the run

    @functools.cached_property
    def schema_errors(self) -> Callable[[Any], Iterator[Any]]:
        """Where a JSON value does not fit the schema."""
        assert self.schema is not None, "used only with a schema"
        if importlib.util.find_spec("jsonschema") is None:
            raise MissingExtra("jsonschema", "graders", "grade: json with a schema")
        import jsonschema

        try:
            read = json.loads(Path(self.schema).expanduser().read_text(encoding="utf-8"))
            jsonschema.validators.validator_for(read).check_schema(read)
        except (OSError, ValueError) as error:
            raise ConfigError(f"grade.schema: {self.schema} cannot be read as JSON: {error}.") from None
        except jsonschema.SchemaError as error:
            raise ConfigError(f"grade.schema: {self.schema} is no JSON schema: {error.message}.") from None
        return jsonschema.validators.validator_for(read)(read).iter_errors

    def __call__(self, row: Row, completion: str) -> Grade:
        try:
            given = _strict_json(completion)
        except ValueError as error:
            return _verdict(False, f"The answer is not JSON: {error}.")
        if self.schema is None:
            answer = row["answer"]
            return _verdict(_same(given, _strict_json(answer) if isinstance(answer, str) else answer), "Not right.")
        problem = next(self.schema_errors(given), None)
        return _verdict(problem is None, "" if problem is None else f"The JSON does not fit: {problem.message}.")


def _strict_json(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


GRADERS: dict[str, type[Checked]] = {
    c.kind: c for c in (Exact, Numeric, Math, Contains, Regex, Json, Judge, RewardModel)
}


@dataclass(frozen=True)
class Function:
    """A function of the user's own."""

    function: Callable[[Row, str], object]

    def __call__(self, row: Row, completion: str) -> Grade:
        return as_grade(self.function(row, completion))


@dataclass(frozen=True)
class InProcess:
    """A grader of foreign code, or with a pattern of the user's, in a worker process: there its time limit holds."""

    grader: Grader
    run: Callable[[Row, str], Grade]

    def __call__(self, row: Row, completion: str) -> Grade:
        return self.run(dict(row), completion)


def _isolated(grader: Grader) -> Grader:
    run = isolated(grader)
    return grader if run is grader else InProcess(grader, run)


@dataclass(frozen=True)
class WeightedSum:
    """Σ weight · reward. Correct where every grader with a positive weight finds the completion correct."""

    parts: tuple[tuple[str, float, Grader], ...]

    def __call__(self, row: Row, completion: str) -> Grade:
        grades = [(name, weight, grader(row, completion)) for name, weight, grader in self.parts]
        extras: dict[str, Extra] = {name: grade.reward for name, _, grade in grades}
        return Grade(
            sum(weight * grade.reward for _, weight, grade in grades),
            " ".join(grade.feedback for _, _, grade in grades if grade.feedback),
            all(grade.correct for _, weight, grade in grades if weight > 0),
            extras,
        )


def build(given: object) -> Grader:
    """The grader that ``grade:`` describes: a name, a mapping with ``kind``, or a list of these."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        name, weight, grader = _one(given)
        return grader if weight == 1.0 else WeightedSum(((name, weight, grader),))
    if not given:
        raise ConfigError("grade: the list is empty; give one grader or more.")
    parts: list[tuple[str, float, Grader]] = []
    for item in given:
        name, weight, grader = _one(item)
        same = sum(n == name or n.startswith(f"{name}_") for n, _, _ in parts)
        parts.append((f"{name}_{same + 1}" if same else name, weight, grader))
    if not any(weight for _, weight, _ in parts):
        raise ConfigError("grade: every weight is 0, so every reward would be 0; give one of them a weight.")
    return WeightedSum(tuple(parts))


def _one(given: object) -> tuple[str, float, Grader]:
    values = dict(given) if isinstance(given, Mapping) else {"kind": given}
    kind, weight = values.pop("kind", None), values.pop("weight", 1.0)
    if not isinstance(kind, str):
        raise ConfigError(
            f"grade: {given!r} names no grader; give one of {', '.join(GRADERS)}, or my_file.py:function."
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"grade.weight: must be a finite number, got {weight!r}.")
    if ":" in kind:
        if values:
            raise ConfigError(f"grade.{next(iter(values))}: {kind} is a function and has no settings; leave it out.")
        return kind.rpartition(":")[2], float(weight), _isolated(_function(kind))
    if kind not in GRADERS:
        raise ConfigError(f"grade: {kind!r} is unknown: {nearest(kind, GRADERS)} A function is my_file.py:function.")
    try:
        made: Any = make(GRADERS[kind], values)
    except FieldProblem as problem:
        raise ConfigError(f"grade.{problem}") from None
    return kind, float(weight), _isolated(made) if isinstance(made, Regex | Math) else made


def _function(entry: str) -> Function:
    found = plugins.find(entry, "grade")
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"grade: {entry} is no function; give a function of the row and the completion.")
    try:
        inspect.signature(found).bind({}, "")
    except TypeError:
        shown = inspect.signature(found)
        raise ConfigError(
            f"grade: {entry} has the parameters {shown}; a grader takes two, the row and the completion."
        ) from None
    return Function(found)
