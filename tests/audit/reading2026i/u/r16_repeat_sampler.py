"""GRPO data stage with repeated prompts (TRL RepeatSampler). Each prompt is repeated once per generation in a row, and the whole generation batch is repeated again for every optimisation pass over it, so the stage emits each row 3 * 2 = 6 times. Prompts at the end that do not fill a batch are dropped. It looks like duplicated and lost data; groups and reuse need it."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of prompt rows, dicts with id and prompt"}
SETTINGS = {}
NOTES = "3 generations per prompt, 4 distinct prompts per generation batch, each batch used 2 times. Output rows get generation (0..2) and use (0..1). The last incomplete batch of prompts is dropped (11 rows give 8). Order of prompts is kept; no shuffling here."
GENERATIONS, PROMPTS, USES = 3, 4, 2


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"id": i, "prompt": [rng.randint(0, 31) for _ in range(3)]} for i in range(11)]}


def right(rows):
    out = []
    for at in range(0, len(rows) - PROMPTS + 1, PROMPTS):
        block = rows[at:at + PROMPTS]
        for use in range(USES):
            for r in block:
                for g in range(GENERATIONS):
                    out.append(dict(r, generation=g, use=use))
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    want = [(i, g) for b in (0, 4) for _ in range(2) for i in range(b, b + 4) for g in range(3)]
    assert [(o["id"], o["generation"]) for o in out] == want and len(out) == 8 * 6
    print(len(out), [o["id"] for o in out[:12]])
