"""``python -m earnest.audit.mutation RESULTS.jsonl``: the score of a stored run, and what survived, as markdown."""

from __future__ import annotations

import sys
from pathlib import Path

from earnest.audit.mutation.run import Score, stored

if __name__ == "__main__":
    score = Score(tuple(stored(Path(sys.argv[1]))))
    print(score.table())
    print("\n| survived at line | what was changed |\n|---|---|")
    for outcome in score.survivors:
        print(f"| {outcome.line} | {outcome.what} |")
