"""Every settings key that a message tells the user to change exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import earnest
from earnest.config.explain import dotted, names
from earnest.config.replicas import SyncConfig
from earnest.config.schema import RunConfig

ADVICE = re.compile(
    r"\b(?:[Rr]aise|[Ll]ower|[Ss]et|[Ii]ncrease|[Rr]educe|[Cc]hange|[Ll]eave) "
    r"([a-z]+(?:_[a-z]+)+\b(?!\.[a-z])|[a-z]+(?:\.[a-z_]+)+)"
)
ELSEWHERE = {"max_cost": "of earnest replay", "tool_choice": "of a request to the server"}
"""Names that are no keys of a recipe."""


def test_the_keys_in_advice_exist() -> None:
    keys = {*dotted(RunConfig), *(f"sync.{name}" for name in names(SyncConfig))}
    short = {part for key in keys for part in key.split(".")}
    found = {
        (match[1], f"{file.name}:{node.lineno}")
        for file in Path(earnest.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for match in ADVICE.finditer(node.value)
    }
    assert len(found) > 30, "the pattern finds the advice in messages"
    wrong = [
        f"{place} names {name}"
        for name, place in sorted(found)
        if name.partition(".")[0] in RunConfig.model_fields or "." not in name
        if name not in keys and not ("." not in name and name in short | ELSEWHERE.keys())
    ]
    assert not wrong
