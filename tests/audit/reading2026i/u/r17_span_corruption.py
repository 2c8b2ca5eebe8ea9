"""T5 span corruption (Raffel et al., arXiv 1910.10683). Random spans are replaced in the input by one sentinel each; the target holds the sentinels and the removed spans. Input and target have different lengths, both shorter than the text, sentinels count down from the end of the vocabulary, and labels are not a shifted copy of the input."""
import random
import torch

FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of dicts: ids = 12 .. 20 token ids (2 .. 39), key = integer of the row"}
SETTINGS = {}
NOTES = "Noise density about 0.15 .. 0.3 in two spans of 2 tokens, not adjacent. Encoder input_ids padded with 0 on the right with attention_mask, labels padded with -100; end of sequence is 1 on both. Sentinels 49, 48. Random by the row's key."
EOS, PAD, SENTINEL = 1, 0, 49


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randint(2, 39) for _ in range(rng.randint(12, 20))], "key": rng.randint(0, 10 ** 6)} for _ in range(5)]}


def right(rows):
    xs, ys = [], []
    for r in rows:
        ids, rng = r["ids"], random.Random(r["key"])
        a = rng.randint(0, len(ids) - 6)
        b = rng.randint(a + 3, len(ids) - 2)
        x, y, at = [], [], 0
        for k, s in enumerate((a, b)):
            x += ids[at:s] + [SENTINEL - k]
            y += [SENTINEL - k] + ids[s:s + 2]
            at = s + 2
        xs.append(x + ids[at:] + [EOS])
        ys.append(y + [EOS])
    w, v = max(map(len, xs)), max(map(len, ys))
    return {"input_ids": torch.tensor([x + [PAD] * (w - len(x)) for x in xs]),
            "attention_mask": torch.tensor([[1] * len(x) + [0] * (w - len(x)) for x in xs]),
            "labels": torch.tensor([y + [-100] * (v - len(y)) for y in ys])}


if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    for r, x, m, y in zip(rows, out["input_ids"].tolist(), out["attention_mask"].tolist(), out["labels"].tolist()):
        x = x[:sum(m)]; y = [t for t in y if t != -100]
        assert x.pop() == EOS and y.pop() == EOS
        spans, cur = {}, None
        for t in y:
            if t >= 48: cur = t; spans[t] = []
            else: spans[cur].append(t)
        assert [u for t in x for u in spans.get(t, [t])] == r["ids"]
    print(out["input_ids"].shape, out["labels"].shape)
