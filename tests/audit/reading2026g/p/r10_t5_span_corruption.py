"""T5 span corruption. The input loses tokens and gains sentinels whose ids count DOWN from the top of the vocabulary; the target holds only the lost spans behind the same sentinels, so input and target have different lengths and neither is a shift of the other (Raffel et al. 2020)."""
import random
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of rows {'index': int, 'ids': list of token ids 2..899, at least 8 long}"}
SETTINGS = {"density": "share of noise tokens, 0.15", "mean_span": "mean length of a noise span, 3.0", "vocab": "vocabulary size, sentinels are vocab-1, vocab-2, …: 1000", "eos": "end token, 1", "seed": "seed of the noise, 0"}
NOTES = "Row-wise; the noise is a function of seed and the row's index, not of its place in the list. Each row starts with clean text and ends with noise, as in T5's random_spans_noise_mask. All targets are trained, no mask. One row in, one row out, order kept; input rows are not changed."
def make(seed):
    r = random.Random(seed)
    return {"rows": [{"index": i, "ids": [r.randrange(2, 900) for _ in range(r.randrange(8, 60))]} for i in range(6)]}
def _split(n, k, r):
    cuts = sorted(r.sample(range(1, n), k - 1))
    return [b - a for a, b in zip([0] + cuts, cuts + [n])]
def right(rows, density=0.15, mean_span=3.0, vocab=1000, eos=1, seed=0):
    out = []
    for row in rows:
        r, ids = random.Random(f"{seed}/{row['index']}"), row["ids"]
        noise = min(max(round(len(ids) * density), 1), len(ids) - 1)
        spans = min(max(round(noise / mean_span), 1), len(ids) - noise)
        source, target, at = [], [], 0
        for k, (clean, lost) in enumerate(zip(_split(len(ids) - noise, spans, r), _split(noise, spans, r))):
            sentinel = vocab - 1 - k
            source += ids[at:at + clean] + [sentinel]
            target += [sentinel] + ids[at + clean:at + clean + lost]
            at += clean + lost
        out.append({"index": row["index"], "ids": source + [eos], "labels": target + [eos]})
    return out
if __name__ == "__main__":
    for seed in range(20):
        rows = make(seed)["rows"]
        got = right(rows)
        for row, g in zip(rows, got):
            spans, cur = {}, None
            for t in g["labels"][:-1]:
                if t >= 900: cur = spans.setdefault(t, [])
                else: cur.append(t)
            back = [x for t in g["ids"][:-1] for x in (spans[t] if t >= 900 else [t])]
            assert back == row["ids"] and list(spans) == [999 - i for i in range(len(spans))]
            assert sum(map(len, spans.values())) == max(round(len(row["ids"]) * 0.15), 1) and all(spans.values())
        assert right(rows[::-1])[::-1] == got
    print("ok", len(rows[0]["ids"]), len(got[0]["ids"]), len(got[0]["labels"]), got[0]["labels"])
