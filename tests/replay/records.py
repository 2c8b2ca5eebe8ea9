"""Pairs and traces for the tests of replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earnest.replay.pairs import Pair


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
    }


def pair(chosen: str, rejected: str = "no", prompt: str = "a question", trace: str = "t", turn: int = 0) -> Pair:
    return Pair(
        trace=trace,
        turn=turn,
        teacher="teacher",
        sample=0,
        margin=0.5,
        judge="teacher",
        winner="teacher",
        prompt=(user(prompt),),
        chosen=said(chosen),
        rejected=said(rejected),
    )


def write_traces(path: Path, conversations: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(c) + "\n" for c in conversations))
    return path
