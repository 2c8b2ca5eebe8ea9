"""The section with conversations: turn by turn, with what was trained and what a hint taught."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from earnest.report.load import load
from earnest.report.page import render
from tests.report import folders


def _sample(phase: str, step: int, **more: Any) -> dict[str, Any]:
    texts = [
        ("template", "<s>user ", 2), ("user", "What does the lamp cost?", 6), ("template", "</s>assistant ", 2),
        ("policy", "price(lamp)", 5), ("template", "</s>tool ", 2), ("tool", "as the <b>stone</b>", 3),
        ("template", "</s>assistant ", 2), ("policy", "The lamp is new.", 4),
    ]  # fmt: skip
    segments = [{"row": 0, "author": author, "text": text, "tokens": tokens} for author, text, tokens in texts]
    if phase == "train":
        segments[3]["taught"], segments[7]["taught"] = 0, 4
    return {
        "phase": phase, "step": step, "version": step, "prompt_id": "lookup:lamp", "sample": 0, "prompt": [],
        "completion": "", "reward": 0.0, "correct": False, "ending": "answered", "turn_rewards": [0.0, 0.0],
        "segments": segments, **more,
    }  # fmt: skip


def _section(tmp_path: Path, *samples: dict[str, Any]) -> str:
    folder = folders.make(tmp_path / "run", steps=20)
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(sample) + "\n" for sample in samples)
    page = render(load(folder))
    return page[page.index('id="conversations"') :].split("</section>")[0]


def test_each_turn_has_its_author_its_tokens_and_what_becomes_of_them(tmp_path: Path) -> None:
    found = _section(tmp_path, _sample("after", 20))
    heads = re.findall(r'class="who">([^<]*)<', found)
    assert heads == ["user · 6 tokens · read", "policy · 5 tokens · sampled", "tool · 3 tokens · read",
                     "policy · 4 tokens · sampled"]  # fmt: skip
    assert found.count('class="segment policy"') == 2 and "segment policy taught" not in found
    assert "as the &lt;b&gt;stone" in found  # a tool's output is text, never markup


def test_the_tokens_that_a_hint_taught_are_marked_and_what_the_teacher_read_is_shown(tmp_path: Path) -> None:
    hinted = _sample("train", 10, teacher_read=["as the stone (Hint: ask for the stone.)"])
    found = _section(tmp_path, _sample("after", 20), hinted, _sample("train", 11))
    assert len(re.findall("<article", found)) == 2  # a conversation of the training is shown where a hint taught it
    assert re.findall(r'class="segment policy taught"[^>]*>([^<]*)<', found) == ["The lamp is new."]
    assert "policy · 4 tokens · trained · 4 taught" in found
    assert "Hint: ask for the stone." in found
