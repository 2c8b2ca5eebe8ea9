"""Every reviewed fault that docs/objectives/README.md names has the test that it names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_named_tests_exist() -> None:
    page = (ROOT / "docs" / "objectives" / "README.md").read_text()
    named = re.findall(r"\| `(tests/[\w/]+\.py)(?:::(\w+))?` \|", page)
    assert len(named) >= 17
    for file, test in named:
        source = (ROOT / file).read_text()
        assert not test or f"def {test}(" in source, f"{file} has no {test}"
