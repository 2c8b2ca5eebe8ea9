"""`earnest data FILE`: what would be trained on, as text, as a page, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from earnest.cli import main


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["data", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_trained_tokens_counts_and_problems_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(
        tmp_path / "a.jsonl",
        [{"prompt": "Sort: b a", "completion": "a b"}, {"prompt": "x", "completion": ""}, {"prompt": "y"}],
    )
    page = tmp_path / "page.html"
    assert run(source, "heldout=0.0", "--html", str(page)) == 1
    shown = capsys.readouterr().out
    assert "completions" in shown and "2 problems" in shown and "line 2: completion is empty" in " ".join(shown.split())
    assert "Sort: b a<|im_end|>" in shown
    assert "<mark>a b&lt;|im_end|&gt;</mark>" in page.read_text()
    assert "<mark>Sort" not in page.read_text()
    assert '<div class="bars" role="img" aria-label="tokens per row' in page.read_text(), "a picture with a name"


def test_json_has_every_number_and_the_exit_code_is_0_where_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a.jsonl", [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(8)])
    assert run(source, "columns.prompt=question", "heldout=0.25", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == "questions" and found["rows"] == 8
    assert found["train"] + found["heldout"] == 8 and not found["problems"]
    assert run(source, "columns={prompt: question}") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no token: an answer is for a grader" in shown and "trained tokens are" not in shown
    assert run(source, "columns={prompt: question, completion: answer}") == 0
    assert "no token" not in (shown := capsys.readouterr().out) and "trained tokens are" in shown


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    for words, sentence in (
        ((source,), "data.columns.prompt=question data.columns.completion=answer"),
        ((source, "columns.prompt=questoin"), "no column 'questoin'; did you mean 'question'?"),
        ((source, "heldot=0.1"), "heldot: unknown key; did you mean 'heldout'?"),
        ((str(tmp_path / "none.jsonl"),), "there is no such file or folder"),
    ):
        assert run(*words) == 2
        assert sentence in capsys.readouterr().err.replace("\n", " ")
