"""docs/findings/reviewed.md names a test for every finding of the reviews, and findings that no other test covers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from earnest.errors import EarnestError
from earnest.objectives.registry import build
from earnest.signals import Batch, FullLogits
from earnest.signals.distributions import derived

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "findings" / "reviewed.md").read_text()
NAMED = re.findall(r"\| `(tests/[\w/]+\.py)(?:::(\w+))?` \|", PAGE)


def test_the_page_has_every_finding_of_the_five_reviews() -> None:
    first, second = PAGE.split("## The five reviews")[1].split("## Errors in losses")
    counts = [len(re.findall("` \\|$", part, re.M)) for part in (first, second)]
    assert counts == [27, 17] and len(NAMED) == 44


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_the_named_test_exists(file: str, test: str) -> None:
    source = (ROOT / file).read_text()
    assert not test or f"def {test}(" in source, f"{file} has no {test}"


def functions(folder: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted((ROOT / "src" / "earnest" / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def raises_not_implemented(node: ast.FunctionDef) -> bool:
    return any(isinstance(n, ast.Raise) and "NotImplementedError" in ast.unparse(n) for n in ast.walk(node))


def test_no_constructor_is_a_stub() -> None:
    """No constructor raises NotImplementedError; in other functions it is the only statement of an abstract method."""
    stubs = []
    for place, node in functions("."):
        body = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        if raises_not_implemented(node) and (node.name in ("__init__", "__new__", "__post_init__") or len(body) != 1):
            stubs.append(place)
    assert not stubs, stubs


@pytest.mark.parametrize("folder", ["engines", "signals", "objectives"])
def test_engines_and_signals_have_explicit_keywords(folder: str) -> None:
    """A ``**kwargs`` of Any hides a wrong or missing argument from the type checker. Two public functions have one, and
    refuse a name that they do not know; private helpers may."""
    loose = [
        node.name
        for _, node in functions(folder)
        if (rest := node.args.kwarg) is not None
        and node.name[0] != "_"
        and (rest.annotation is None or ast.unparse(rest.annotation) == "Any")
    ]
    assert set(loose) <= {"build", "derived"}, loose


def test_free_keywords_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(EarnestError, match="clipp"):
        build("grpo", clipp=0.2)
    with pytest.raises(EarnestError, match="advantage"):
        Batch.from_rows([[1]], [[2]], role=["rollout"]).with_signals(advantage=torch.zeros(1))
    with pytest.raises(AssertionError, match="logit"):
        derived(FullLogits(torch.zeros(1, 2)), logit=torch.zeros(1, 2))
