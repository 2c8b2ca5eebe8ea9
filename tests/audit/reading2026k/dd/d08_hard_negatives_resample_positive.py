"""Resampled hard negatives contain the positive.
modelscope/ms-swift#10068, https://github.com/modelscope/ms-swift/pull/10068, 2026 (first reported as #5600).
If a row has fewer negatives than INFONCE_HARD_NEGATIVES, the missing ones are resampled from the group [anchor, positive,
negatives...]. The sampled indices were offset by one instead of two: the positive is in the population and the last
supplied negative is not, so the positive is also a negative in the InfoNCE denominator."""
import random

FAMILY = "embeddings"
KIND = "data stage"
INPUTS = {"rows": "list of {'anchor': text id, 'positive': text id, 'negatives': list of text ids (at least one), 'seed': int}; text ids are different within a row"}
SETTINGS = {"hard_negatives": "number of negatives per row after this stage, 4"}
NOTES = ("Each row keeps its anchor, positive and seed and gets exactly hard_negatives negatives. If the row has more, the first "
         "hard_negatives are kept; if it has fewer, all are kept in order and the missing ones are drawn, with replacement, "
         "uniformly from the row's own negatives, from a random generator seeded with the row's 'seed'. Rows stay in order; "
         "none is added or dropped.")


def make(seed):
    rng = random.Random(seed)
    rows = []
    for n in (1, 2, 6, 3, 1, 4):
        texts = rng.sample(range(100000), n + 2)
        rows.append({"anchor": texts[0], "positive": texts[1], "negatives": texts[2:], "seed": rng.randrange(10 ** 6)})
    return {"rows": rows}


def broken(rows, hard_negatives=4):
    out = []
    for row in rows:
        group = [row["anchor"], row["positive"], *row["negatives"]]
        negatives = len(group) - 2
        if negatives > hard_negatives:
            group = group[:hard_negatives + 2]
        elif negatives < hard_negatives:
            rng = random.Random(row["seed"])
            indices = [rng.randrange(negatives) + 1 for _ in range(hard_negatives - negatives)]
            group = group + [group[i] for i in indices]
        out.append({"anchor": group[0], "positive": group[1], "negatives": group[2:], "seed": row["seed"]})
    return out


def right(rows, hard_negatives=4):
    out = []
    for row in rows:
        group = [row["anchor"], row["positive"], *row["negatives"]]
        negatives = len(group) - 2
        if negatives > hard_negatives:
            group = group[:hard_negatives + 2]
        elif negatives < hard_negatives:
            rng = random.Random(row["seed"])
            indices = [rng.randrange(negatives) + 2 for _ in range(hard_negatives - negatives)]
            group = group + [group[i] for i in indices]
        out.append({"anchor": group[0], "positive": group[1], "negatives": group[2:], "seed": row["seed"]})
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    for fn in (broken, right):
        print(fn.__name__, "rows whose positive is among the negatives:", sum(r["positive"] in r["negatives"] for r in fn(rows)))
    assert any(r["positive"] in r["negatives"] for r in broken(rows))
    assert not any(r["positive"] in r["negatives"] for r in right(rows))
