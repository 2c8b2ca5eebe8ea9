"""nano's training text: nothing held out is in it, its renderer is the chat template, its script repeats itself."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from earnest import data
from earnest.tasks import get_task
from earnest.tasks.puzzles import PUZZLES
from earnest.tasks.split import split_of
from scripts.nano import corpus, train
from scripts.nano.train import FOLDER

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def documents() -> list[corpus.Document]:
    return [d for slips in (0.0, 1.0) for d in itertools.islice(corpus.documents(1, slips), 6_000)]


def test_every_kind_is_there(documents: list[corpus.Document]) -> None:
    assert {d.kind for d in documents} == {"untold", "told", "style", "holes", "tool", "chat", "probe", "plain"}


def test_no_heldout_question_is_in_the_text(documents: list[corpus.Document]) -> None:
    """Every user turn is cut back to its question (what stands before a blank line) and looked up among the held-out."""
    heldout = {
        str(p.messages[-1]["content"])
        for name in ("holes", *(p.name for p in PUZZLES))
        for p in get_task(name).prompts("heldout", 1500, 0)
    }
    heldout |= {str(p.messages[-1]["content"]) for p in get_task("style/warmth").prompts("heldout", 50, 0)}
    heldout |= {p["prompt"] for p in data.probes()}
    asked = {m["content"].split("\n\n")[0] for d in documents for m in d.messages if m["role"] == "user"}
    assert len(asked) > 5_000
    assert not asked & heldout


def test_no_heldout_sentence_is_in_the_text(documents: list[corpus.Document]) -> None:
    heldout = {s for line in data.plain_heldout() for s in re.findall(r"[^.]+\.", line)}
    heldout = {s.strip() for s in heldout}
    trained = {s.strip() for d in documents for s in re.findall(r"[^.]+\.", d.text)}
    assert len(heldout) > 200
    assert not trained & heldout
    assert all(split_of(f"plain|{s}") == "heldout" for s in heldout)


def test_the_renderer_is_the_chat_template(documents: list[corpus.Document]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    chosen = [
        d
        for kind in ("untold", "told", "style", "tool", "chat", "probe")
        for d in [d for d in documents if d.kind == kind][:8]
    ]
    for document, encoded in zip(chosen, train.encode(tokenizer.backend_tokenizer, chosen), strict=True):
        rendered = tokenizer.apply_chat_template(
            document.messages, tools=document.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert rendered["input_ids"] == encoded.ids
        assert rendered["assistant_masks"] == [int(w == 1.0) for w in encoded.weight]


def test_slips_are_wrong_and_told_answers_are_right(documents: list[corpus.Document]) -> None:
    """The text is what it is meant to be: schooling right, first attempts right sometimes."""
    sort = {"0": [], "1": []}
    for i, d in enumerate(documents):
        question = d.messages[0]["content"] if d.kind == "untold" else ""
        if question.startswith("Sort "):
            digits = question.removeprefix("Sort ").removesuffix(".")
            sort[str(int(i >= 6_000))].append(d.messages[1]["content"] == "".join(sorted(digits)))
    assert all(sort["0"])
    assert len(sort["1"]) > 200
    assert 0.3 < sum(sort["1"]) / len(sort["1"]) < 0.55


def test_two_runs_of_the_script_are_bit_equal(tmp_path: Path) -> None:
    """A few steps in two processes with different hash seeds: weights and tokenizer byte for byte."""
    digests = []
    for i in ("1", "2"):
        out = tmp_path / i
        command = [sys.executable, "-m", "scripts.nano.train", "--tokens", "6000", "--out", str(out)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": i}, check=True, capture_output=True)
        digests.append(train.digest(out))
    assert digests[0] == digests[1]
