"""Each operator for defaults, arguments, guards, cleanup, locks and thresholds makes exactly the change it names."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from earnest.mutation.operators import Rewrite, arguments, mutants
from scripts.mutants.judge import executing, within
from scripts.mutants.table import results, rows
from scripts.mutants.wiring import (
    WIRING,
    argument_dropped,
    cleanup_removed,
    condition,
    default,
    guard_removed,
    keywords_swapped,
    lock_removed,
    off_by_one,
    state_lost,
    threshold,
)


@pytest.mark.parametrize(
    ("operator", "source", "expected"),
    [
        (default, "def f(a, b=1, *, c=True): ...", ["def f(a, b=2, *, c=True): ...", "def f(a, b=1, *, c=False): ..."]),
        (default, "x: float = 0.5", ["x: float = 1.0"]),
        (default, "x: float = 0.0", ["x: float = 1.0"]),
        (default, "def f(a=None, b='x'): ...", []),
        (argument_dropped, "f(a, b=1, **c)", ["f(a, **c)"]),
        (arguments, "f(a, b)", ["f(b, a)"]),
        (arguments, "f(a, b, c)", ["f(b, a, c)"]),
        (arguments, "f(a, *b)", []),
        (guard_removed, "if a:\n    raise E\nb", ["pass\nb"]),
        (guard_removed, "if a:\n    b()\n", []),
        (guard_removed, "if a:\n    raise E\nelse:\n    b()", []),
        (condition, "a and b and c", ["a and b"]),
        (condition, "not a", ["a"]),
        (cleanup_removed, "f.close()\nf.open()", ["pass\nf.open()"]),
        (cleanup_removed, "try:\n    a()\nfinally:\n    b()", ["try:\n    a()\nfinally:\n    pass"]),
        (lock_removed, "with self._lock:\n    a()", ["if True:\n    a()"]),
        (lock_removed, "with open(a):\n    a()", []),
        (threshold, "a < b", ["a <= b"]),
        (threshold, "a <= b < c", ["a < b < c"]),
        (threshold, "a == b", []),
        (off_by_one, "n + 1", ["n"]),
        (off_by_one, "n + 2", []),
        (off_by_one, "x[1:]", ["x[0:]"]),
        (off_by_one, "range(n)", ["range(n - 1)"]),
        (state_lost, "def f(self):\n    self.n += 1\n    a = 2", ["def f(self):\n    pass\n    a = 2"]),
        (state_lost, "def __init__(self):\n    self.n = 1", []),
        (keywords_swapped, "f(a=x, b=y, c=z)", ["f(a=y, b=x, c=z)"]),
        (keywords_swapped, "f(a=x, b=x)", []),
    ],
)
def test_an_operator_makes_the_change_it_names(operator: Rewrite, source: str, expected: list[str]) -> None:
    made = [ast.unparse(ast.parse(m.source)) for m in mutants(source, (operator,))]
    assert made == [ast.unparse(ast.parse(text)) for text in expected]


def test_a_change_is_on_the_line_where_a_reader_finds_it() -> None:
    source = "def f(\n    self,\n    n=1,\n):\n    a = 2\n    self.n = a\n"
    assert [(m.line, m.what) for m in mutants(source, (state_lost,))] == [(6, "`self.n = a` is removed")]
    assert [m.line for m in mutants(source, (default,))] == [2]
    assert len({operator.__name__ for operator in WIRING}) == len(WIRING)


def test_the_tests_of_a_mutant_execute_its_line_or_what_is_around_it() -> None:
    tree = ast.parse("import a\n\ndef f(n=1):\n    return n\n\ndef g():\n    return 2\n")
    seconds = {"slow": 3.0, "quick": 1.0, "other": 2.0}
    measured = {"seconds": seconds, "lines": {"m.py": {3: {"other"}, 4: {"slow", "quick"}, 7: {"other"}}}}
    assert executing(measured, Path("m.py"), tree, 4) == ["quick", "slow"]
    assert executing(measured, Path("m.py"), tree, 3) == ["quick", "slow"], "a default runs on import"
    assert executing(measured, Path("m.py"), tree, 1) == ["quick", "other", "slow"]
    assert executing(measured, Path("n.py"), tree, 1) == []
    assert within(["a", "b", "c"], {"a": 99.0, "b": 30.0, "c": 30.0}, 40.0) == ["a", "b"]


def test_the_table_counts_the_last_result_and_leaves_equivalents_out_of_the_score(tmp_path: Path) -> None:
    def line(key: str, fate: str) -> str:
        return json.dumps({"file": "src/earnest/a.py", "line": 1, "what": "x | y", "fate": fate, "key": key})

    fates = [("1", "survived"), ("2", "killed"), ("3", "survived"), ("4", "no tests"), ("1", "timeout")]
    (tmp_path / "a.jsonl").write_text("\n".join(line(*fate) for fate in fates))
    made = list(rows(results(tmp_path), {"3": "no input reaches it", "2": "not used: a test detects it"}))
    assert made[2] == "| `a` | 4 | 2 | 1 | 1 | 67% |"
    assert made[6:] == ["| `a.py` | 1 | x \\| y | no input reaches it |", "| `a.py` | 1 | x \\| y |  |"]


def test_a_text_of_60_characters_is_named_in_full() -> None:
    for size, cut in ((60, False), (61, True)):
        (guard,) = mutants(f"if {'x' * (size - 5)} < 12:\n    raise E", (guard_removed,))
        assert guard.what.endswith("...` is removed") == cut
