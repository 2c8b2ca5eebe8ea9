"""The benchmark of the server is a test, too: it fails where learning takes too much of chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.serve import THEIRS, WINDOWS, main


@pytest.mark.parametrize(("cost", "fails"), [(0.15, False), (0.30, False), (0.301, True), (float("nan"), True)])
def test_learning_costs_chat_at_most_30_percent(cost: float, fails: bool, tmp_path: Path, monkeypatch, capsys) -> None:
    row = {"tokens_per_second": 1.0, "p50": 1.0, "p99": 1.0, "versions": 1}
    stored = tmp_path / "serve.json"
    stored.write_text(json.dumps({"rows": dict.fromkeys((THEIRS, *WINDOWS), row), "cost_of_learning": cost}))
    monkeypatch.setattr(sys, "argv", ["serve.py", "--table", "--out", str(stored)])
    if not fails:
        main()
    else:
        with pytest.raises(SystemExit, match="at most 30% is allowed"):
            main()
    assert "learning costs chat" in capsys.readouterr().out, "the table is shown either way"
