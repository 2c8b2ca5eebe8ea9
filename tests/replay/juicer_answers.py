"""Run in data-juicer's own environment: verdicts of each op on all texts, and the texts that pass all of them in turn.

python juicer_answers.py < [{"ops": [...], "texts": [...]}]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from earnest.replay.filters import Op
from earnest.replay.juicer import Juicer


def answer(backend: Juicer, ops: list[dict[str, Any]], texts: list[str]) -> dict[str, Any]:
    made = [Op(op["op"], op["field"], op["settings"]) for op in ops]
    verdicts = [[[v.keep, v.value] for v in backend.judge(op, texts)] for op in made]
    left = list(range(len(texts)))
    for op in made:
        left = [i for i, v in zip(left, backend.judge(op, [texts[i] for i in left]), strict=True) if v.keep]
    return {"verdicts": verdicts, "survivors": left}


if __name__ == "__main__":
    juicer = Juicer()
    sys.stdout.write(json.dumps([answer(juicer, job["ops"], job["texts"]) for job in json.load(sys.stdin)]))
