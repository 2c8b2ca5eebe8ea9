"""The section with rows of the user's file: which tokens are trained; and the processes of a sharded run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from earnest.report.load import load
from earnest.report.page import render
from tests.report import folders


def test_the_trained_tokens_of_a_row_are_marked_and_no_rollout(tmp_path: Path) -> None:
    folder = folders.make(tmp_path / "run", steps=20)
    plain = render(load(folder))
    texts = (("template", "<user> Spell 42.", 6), ("data", "4 2", 3))
    segments = [{"row": 0, "author": author, "text": text, "tokens": tokens} for author, text, tokens in texts]
    row = {"phase": "train", "step": 0, "version": 0, "prompt_id": "training row 1", "sample": 0, "prompt": []}
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(row | {"completion": "", "segments": segments}) + "\n")
    page = render(load(folder))
    assert "training row 1: 3 of 9 tokens trained" in page and re.findall("<mark>(.*?)</mark>", page) == ["4 2"]
    assert "&lt;user&gt; Spell 42." in page and 'href="#data"' in page
    assert 'id="data"' not in plain and 'href="#data"' not in plain and 'id="conversations"' not in page
    rollouts = r"Training rollouts \((\d+)\)"
    assert re.findall(rollouts, page) == re.findall(rollouts, plain)


def test_the_processes_of_a_sharded_run(tmp_path: Path) -> None:
    folder = folders.make(tmp_path / "run", steps=20)
    assert "<dt>processes</dt>" not in render(load(folder))
    with (folder / "config.yaml").open("a") as file:
        file.write("engine: {shard: 2, replicate: 3}\n")
    assert "<dt>processes</dt><dd>6: the base in 2 shards, 3 copies of it</dd>" in render(load(folder))
    (folder / "config.yaml").write_text("engine: [")
    assert "<dt>processes</dt>" not in render(load(folder))
