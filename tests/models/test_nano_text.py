"""nano's training text: nothing held out is in it, its renderer equals the chat template, its script is
deterministic."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from earnest import data
from earnest.tasks import get_task
from earnest.tasks.puzzles import PUZZLES
from earnest.tasks.split import split_of
from scripts.nano import corpus, train
from scripts.nano.train import FOLDER

ROOT = Path(__file__).parents[2]


TEXT = {stage.name: list(itertools.islice(corpus.documents(1, stage), 4_000)) for stage in corpus.STAGES}


@pytest.fixture(scope="module")
def documents() -> list[corpus.Document]:
    return [d for part in TEXT.values() for d in part]


def test_every_kind_is_there(documents: list[corpus.Document]) -> None:
    assert {d.kind for d in documents} == {"untold", "told", "style", "holes", "tool", "chat", "probe", "plain"}


def test_no_heldout_question_is_in_the_text(documents: list[corpus.Document]) -> None:
    """Every user turn is cut back to its question (what stands before a blank line) and looked up there."""
    heldout = {
        str(p.messages[-1]["content"])
        for name in ("holes", *(p.name for p in PUZZLES))
        for p in get_task(name).prompts("heldout", 300, 0)
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


def _sorted_right(documents: list[corpus.Document]) -> float:
    talks = [d.messages for d in documents if d.kind == "untold" and d.messages[0]["content"].startswith("Sort ")]
    assert len(talks) > 150
    return sum(a["content"] == "".join(sorted(q["content"][5:-1])) for q, a in talks) / len(talks)


def test_school_and_practice_have_only_right_answers_and_life_also_wrong_ones() -> None:
    assert _sorted_right(TEXT["school"]) == _sorted_right(TEXT["practice"]) == 1.0
    assert 0.3 < _sorted_right(TEXT["life"]) < 0.55


def test_the_same_plan_trains_the_same_weights() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER).backend_tokenizer
    settings = train.Settings(width=32, hidden=64, layers=1, heads=2)
    plan = train.batches(train.encode(tokenizer, TEXT["life"][:200]), settings)

    def run() -> list[torch.Tensor]:
        model = train.make_model(tokenizer, settings)
        losses = list(train.train(model, plan, settings, Console(quiet=True)))
        assert len(losses) == len(plan)
        return list(model.state_dict().values())

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_padding_and_prompt_weigh_what_they_should() -> None:
    """A document alone and beside a longer one has the same loss; the prompt's tokens weigh a little, not nothing."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER).backend_tokenizer
    model = train.make_model(tokenizer, train.Settings(width=32, hidden=64, layers=1, heads=2))
    short, long = sorted(train.encode(tokenizer, TEXT["life"][:50]), key=lambda d: len(d.ids))[::49]
    ids, weight = train.collate([short, long], 0)
    assert weight[0, len(short.ids) :].sum() == 0
    alone = train.loss_of(model, *train.collate([short], 0))
    beside = train.loss_of(model, ids, weight * torch.tensor([[1.0], [0.0]]))
    torch.testing.assert_close(alone, beside)
    assert {round(w, 3) for w in weight.unique().tolist()} == {0.0, train.PROMPT_WEIGHT, 1.0}


def _record() -> dict[str, Any]:
    return json.loads((FOLDER / "training.json").read_text())


def test_the_scripts_settings_are_those_of_the_shipped_weights() -> None:
    assert vars(train.Settings()) == _record()["settings"]


@pytest.mark.slow
def test_the_scripts_text_is_that_of_the_shipped_weights() -> None:
    """After a change of the mix without new training, the script would make another model than this one."""
    settings, record = train.Settings(), _record()
    tokenizer = train.make_tokenizer(settings.seed)
    shipped = json.loads((FOLDER / "tokenizer.json").read_text())["model"]
    made = json.loads(tokenizer.to_str())["model"]
    assert (made["vocab"], made["merges"]) == (shipped["vocab"], shipped["merges"])
    kinds, documents, steps = Counter[str](), 0, 0
    for stage in corpus.STAGES:
        part, tokens = train.make_documents(tokenizer, settings, stage)
        steps += len(train.batches(part, settings))
        documents += len(part)
        kinds += tokens
    assert (kinds.total(), documents, steps) == (record["tokens"], record["documents"], record["steps"])
    shares = {kind: round(count / kinds.total(), 4) for kind, count in kinds.items()}
    assert shares == record["share_of_tokens"]


@pytest.mark.slow
def test_two_runs_of_the_script_are_bit_equal(tmp_path: Path) -> None:
    """A few steps in two processes with different hash seeds: weights and tokenizer byte for byte."""
    digests = []
    for i in ("1", "2"):
        out = tmp_path / i
        command = [sys.executable, "-m", "scripts.nano.train", "--tokens", "1000", "--out", str(out)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": i}, check=True, capture_output=True)
        digests.append(train.digest(out))
    assert digests[0] == digests[1]
