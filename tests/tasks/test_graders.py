"""Each built-in grader on hand-made cases, weighted sums, and one clear sentence for every wrong ``grade:``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.errors import ConfigError, EarnestError
from earnest.tasks import Grade
from earnest.tasks.graders import build, last_number

WORDS = st.text(st.characters(categories=["L", "N"]), min_size=1)


@pytest.mark.parametrize(
    ("grade", "answer", "right", "wrong"),
    [
        ("exact", "Paris", ["Paris", " Paris\n"], ["paris", "Paris.", "", "It is Paris"]),
        ({"kind": "exact", "ignore_case": True}, "Paris", ["PARIS"], ["Parish", ""]),
        ("exact", 7, ["7"], ["7.0", "-7"]),
        ("numeric", "#### 1,234", ["1234", "so it is 1,234.", "1234.0", "= 1.234e3"], ["", "1,235", "234", "-1234"]),
        ("numeric", -0.5, ["-.5", "x=-0.5", "\N{MINUS SIGN}0.5"], ["0.5", "-5", "-0.55"]),
        ("numeric", "0", ["0", "0.0"], ["1", "none"]),
        ({"kind": "numeric", "tolerance": 0.01}, "3.14159", ["3.14"], ["3.2"]),
        ("math", r"\frac{1}{2}", ["0.5", r"$\frac{2}{4}$", r"\boxed{1/2}"], ["", "0.6", "no idea"]),
        ("contains", "12", ["it is 12.", "12", "(12)"], ["120", "a12", "", "1 2"]),
        ("contains", "New York", ["in new york city"], ["newyork"]),
        ({"kind": "contains", "ignore_case": False}, "Ja", ["Ja!"], ["ja"]),
        ("contains", "C++ (new)", ["I use C++ (new) here"], ["C+ (new)"]),
        ({"kind": "regex", "pattern": r"<a>(.*)</a>"}, "4", ["<a> 4\n</a>"], ["4", "<a>5</a>"]),
        ({"kind": "regex", "pattern": r"^\w+$"}, "unread", ["one"], ["one two", ""]),
        ("json", {"a": [1, True]}, ['{"a": [1, true]}', '{"a":[1.0,true]}'], ['{"a": [1, 1]}', '{"a": [1]}']),
        ("json", 3, ["3"], ["{", "", "NaN", "4"]),
        ("json", '{"a": 1}', ['{"a": 1}'], ['{"a": 2}', '{"a": true}']),
    ],
)  # fmt: skip
def test_right_and_wrong_completions(grade: Any, answer: object, right: list[str], wrong: list[str]) -> None:
    grader = build(grade)
    for completion in right:
        found = grader({"answer": answer}, completion)
        assert (found.reward, found.correct, found.feedback) == (1.0, True, ""), completion
    for completion in wrong:
        found = grader({"answer": answer}, completion)
        assert (found.reward, found.correct) == (0.0, False), completion
        assert found.feedback


def test_json_with_a_schema(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}))
    grader = build({"kind": "json", "schema": str(file)})
    assert grader({}, '{"name": "Ada"}').correct
    found = grader({}, '{"name": 3}')
    assert not found.correct and "3 is not of type 'string'" in found.feedback
    file.write_text('{"type": "no such type"}')
    with pytest.raises(EarnestError, match="is no JSON schema"):
        build({"kind": "json", "schema": str(file)})


@given(st.integers(-(10**12), 10**12), st.text(st.characters(categories=["L", "Zs"]), max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_whole_number_is_read_back(number: int, before: str) -> None:
    assert last_number(f"{before} {number}.") == number
    assert last_number(f"7 {before} {number:,}") == number
    assert build("numeric")({"answer": number}, f"{before} {number}").correct
    assert not build("numeric")({"answer": number}, f"{number} {before} {number + 10**7}").correct


@given(WORDS, WORDS)
@settings(max_examples=60, deadline=None)
def test_a_grader_accepts_its_answer_and_no_longer_word(answer: str, other: str) -> None:
    for kind in ("exact", "contains"):
        assert build(kind)({"answer": answer}, answer).correct
        assert not build(kind)({"answer": answer + other}, answer).correct
        assert not build(kind)({"answer": answer}, "_" + answer).correct


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.floats(-4, 4), st.floats(-4, 4))
@settings(max_examples=40, deadline=None)
def test_a_list_is_the_weighted_sum(reward: float, first: float, second: float) -> None:
    grader = build([{"kind": "exact", "weight": first}, {"kind": "contains", "weight": second}, "numeric"])
    found = grader({"answer": "3"}, "it is 3")
    assert found.reward == pytest.approx(second + 1)
    assert found.extras == {"exact": 0.0, "contains": 1.0, "numeric": 1.0}
    assert found.correct == (first <= 0), "a grader with a positive weight has to agree"
    assert found.feedback == "The answer is not right."


REWARDS = """
from earnest.tasks import Grade
def half(row, completion): return 0.5 * (completion == row["answer"])
def whole(row, completion): return completion == row["answer"]
def graded(row, completion): return Grade(0.25, "try again", False)
def text(row, completion): return "good"
def one(row): return 1.0
value = 3
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return str(tmp_path / "rewards.py")


def test_a_function_returns_a_number_or_a_grade(rewards: str) -> None:
    row = {"answer": "a"}
    assert build(f"{rewards}:half")(row, "a") == Grade(0.5, "", False)
    assert build(f"{rewards}:whole")(row, "a") == Grade(1.0, "", True)
    assert build(f"{rewards}:graded")(row, "a") == Grade(0.25, "try again", False)
    assert build({"kind": f"{rewards}:half", "weight": -2})(row, "a").reward == -1.0
    with pytest.raises(TypeError, match="'good', a str; return a number or a Grade"):
        build(f"{rewards}:text")(row, "a")
    both = build([f"{rewards}:half", f"{rewards}:half"])(row, "a")
    assert both.extras == {"half": 0.5, "half_2": 0.5}


@pytest.mark.parametrize(
    ("grade", "sentence"),
    [
        ("exat", "grade: 'exat' is unknown: did you mean 'exact'"),
        (3, "grade: 3 names no grader"),
        ([], "grade: the list is empty"),
        ([{"kind": "exact", "weight": 0}], "every weight is 0"),
        ({"kind": "exact", "weight": math.nan}, "grade.weight: must be a finite number, got nan"),
        ({"kind": "exact", "weight": "1"}, "grade.weight: must be a finite number, got '1'"),
        ({"kind": "exact", "ignorecase": True}, "grade.ignorecase: unknown key; did you mean 'ignore_case'"),
        ("regex", "grade.pattern: is required"),
        ({"kind": "regex", "pattern": "("}, r"grade.pattern: '\(' is no regular expression"),
        ({"kind": "numeric", "tolerance": -1}, "grade.tolerance: must be a finite number at least 0, got -1"),
        ({"kind": "json", "schema": "nowhere.json"}, "grade.schema: nowhere.json cannot be read"),
        ("nowhere.py:score", "grade: there is no file .*nowhere.py"),
        ("no_such_module:score", "grade: no_such_module cannot be imported"),
        ("FILE:hal", "has no 'hal'; did you mean 'half'"),
        ("FILE:value", "FILE:value is no function"),
        ("FILE:one", r"has the parameters \(row\); a grader takes two"),
        ({"kind": "FILE:half", "scale": 2}, "grade.scale: .* is a function and has no settings"),
    ],
)
def test_a_wrong_grader_is_one_sentence(rewards: str, grade: Any, sentence: str) -> None:
    written = json.loads(json.dumps(grade).replace("FILE", rewards))
    with pytest.raises(ConfigError, match=sentence.replace("FILE", ".*rewards.py")) as caught:
        build(written)
    assert "\n" not in str(caught.value)
