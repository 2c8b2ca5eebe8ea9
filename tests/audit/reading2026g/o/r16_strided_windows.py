"""Overlapping windows with labels only on the new tokens. Tokens appear in several rows (looks like duplicated data), but each token is trained or scored in exactly one; the overlap is only context. Convention of transformers' page on the perplexity of fixed-length models."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {'ids': list of at least 2 token ids}, whole documents"}
SETTINGS = {"window": "tokens per window, 12", "stride": "new tokens per window, 5 (must be less than the window)"}
NOTES = ("Out: rows {'ids', 'labels', 'doc', 'start'}, more rows than came in. labels = ids on new tokens, -100 on the overlap, not shifted (the loss shifts). The first window of a document labels all its tokens. stride < window gives each labelled token a predecessor in its window, "
         "except the first of the document, which the shift drops. Each document gives len - 1 predictions in all. No window after the document's end is reached.")


def right(rows, window=12, stride=5):
    if not 0 < stride < window:
        raise ValueError("stride must be less than window")
    out = []
    for d, r in enumerate(rows):
        x, done = r["ids"], 0
        for start in range(0, len(x), stride):
            end = min(start + window, len(x))
            out.append({"ids": x[start:end], "labels": [-100] * (done - start) + x[done:end], "doc": d, "start": start})
            done = end
            if end == len(x):
                break
    return out


def make(seed):
    import random
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randrange(50) for _ in range(rng.randint(2, 70))]} for _ in range(8)]}


if __name__ == "__main__":
    for seed in range(20):
        rows = make(seed)["rows"]
        count = [[0] * len(r["ids"]) for r in rows]
        least = 99
        for o in right(rows):
            assert len(o["ids"]) == len(o["labels"]) <= 12
            for j in range(1, len(o["ids"])):             # the shift: position j is predicted from before j
                if o["labels"][j] != -100:
                    assert o["labels"][j] == rows[o["doc"]]["ids"][o["start"] + j]
                    count[o["doc"]][o["start"] + j] += 1
                    if o["start"]:
                        least = min(least, j)
        assert all(c == [0] + [1] * (len(c) - 1) for c in count)
        assert least >= 7
    print("each token but the first predicted exactly once; least context after the first window:", least)
