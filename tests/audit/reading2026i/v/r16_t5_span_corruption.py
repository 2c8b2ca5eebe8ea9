"""T5 span corruption. Inputs lose random spans, each replaced by one sentinel; the target lists sentinel + span and ends
with the end id. Sentinel ids count down from the top of the vocabulary (extra_id_0 is the largest id). Inputs and targets
have different lengths, and no target token is aligned with an input token."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {'ids': token ids in 2..39, 'key': number of the row in the corpus}"}
SETTINGS = {"density": "share of corrupted tokens, 0.15", "mean_span": "mean span length, 3", "seed": "seed of the stage, 0"}
NOTES = ("Encoder-decoder pre-training data. Sentinels are 49, 48, 47, …; end id is 1. The random spans depend on the "
         "stage's seed and the row's key only, so the result does not depend on order or batch. The row starts with a kept "
         "span and ends with a corrupted one, as in the published code. Rows have at least 8 tokens.")


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(2, 40) for _ in range(r.randrange(30, 60))], "key": k} for k in range(5)], "density": 0.15,
            "mean_span": 3, "seed": seed}


def segments(r, total, parts):
    """A random composition of total into positive parts."""
    cuts = sorted(r.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0] + cuts, cuts + [total])]


def right(rows, density=0.15, mean_span=3, seed=0):
    out = []
    for row in rows:
        r = random.Random(f"{seed}-{row['key']}")
        n = len(row["ids"])
        noise = min(max(round(n * density), 1), n - 1)
        spans = max(round(noise / mean_span), 1)
        noise_lengths, keep_lengths = segments(r, noise, spans), segments(r, n - noise, spans)
        at, inputs, targets = 0, [], []
        for k, (keep, drop) in enumerate(zip(keep_lengths, noise_lengths)):
            inputs += row["ids"][at:at + keep] + [49 - k]
            targets += [49 - k] + row["ids"][at + keep:at + keep + drop]
            at += keep + drop
        out.append({"input_ids": inputs + [1], "labels": targets + [1], "key": row["key"]})
    return out


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    for row, o in zip(d["rows"], out):
        spans, cur = {}, None
        for t in o["labels"][:-1]:
            if t >= 40:
                cur = spans.setdefault(t, [])
            else:
                cur.append(t)
        back = [x for t in o["input_ids"][:-1] for x in (spans[t] if t >= 40 else [t])]
        assert back == row["ids"] and o["labels"][-1] == 1
    print(d["rows"][0], out[0], sep="\n")
    assert right(d["rows"][::-1], seed=0)[::-1] == out
