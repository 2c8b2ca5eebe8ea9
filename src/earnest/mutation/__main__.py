"""``python -m earnest.mutation RESULTS.jsonl …``: scores and surviving mutants of stored runs, as markdown."""

import sys
from pathlib import Path

from earnest.mutation.score import Score, stored

if __name__ == "__main__":
    score = Score(tuple(outcome for path in sys.argv[1:] for outcome in stored(Path(path))))
    print(score.table())
    print("\n| survived in | line | what was changed |\n|---|---|---|")
    for outcome in score.survivors:
        print(f"| `{outcome.file}` | {outcome.line} | {outcome.what} |")
