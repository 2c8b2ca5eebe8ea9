"""T5 span corruption collator (Raffel et al. 2020, transformers' run_t5_mlm_flax): noise spans of the text are replaced by sentinels that count DOWN from the top of the vocabulary; the target holds the sentinels with the removed tokens. Input and target have different lengths and neither is a shift of the other; the target is a
short sequence and ends with a final sentinel that is not in the input, then the end token."""
import random
import torch

FAMILY = "data"
KIND = "collator"
INPUTS = {"rows": "list of {'id': integer, 'input_ids': ids without end token}"}
SETTINGS = {"density": "share of noised tokens, 0.3", "mean_span": "mean length of a noise span, 2", "vocab": "50; sentinels are 49, 48, …", "pad": "0", "end": "1"}
NOTES = "Encoder-decoder: input_ids, attention_mask, labels (-100 on padding, not shifted; the model shifts to the right itself). Noise depends on the row's id only. Each row begins with kept text. Rows need at least 4 tokens. Output shapes depend on the longest row."


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"id": 100 * seed + i, "input_ids": [r.randrange(2, 40) for _ in range(n)]} for i, n in enumerate((12, 9, 20, 5))]}


def _parts(r, total, pieces):
    cuts = sorted(r.sample(range(1, total), pieces - 1))
    return [b - a for a, b in zip([0] + cuts, cuts + [total])]


def right(rows, density=0.3, mean_span=2, vocab=50, pad=0, end=1):
    sources, targets = [], []
    for row in rows:
        r, ids = random.Random(row["id"]), row["input_ids"]
        noise = min(max(round(len(ids) * density), 1), len(ids) - 1)
        spans = min(max(round(noise / mean_span), 1), len(ids) - noise)
        kept, removed = _parts(r, len(ids) - noise, spans), _parts(r, noise, spans)
        source, target, at = [], [], 0
        for i, (k, n) in enumerate(zip(kept, removed)):
            source += ids[at:at + k] + [vocab - 1 - i]
            target += [vocab - 1 - i] + ids[at + k:at + k + n]
            at += k + n
        sources.append(source + [end])
        targets.append(target + [vocab - 1 - spans, end])
    w, h = max(map(len, sources)), max(map(len, targets))
    return {"input_ids": torch.tensor([s + [pad] * (w - len(s)) for s in sources]),
            "attention_mask": torch.tensor([[1] * len(s) + [0] * (w - len(s)) for s in sources]),
            "labels": torch.tensor([t + [-100] * (h - len(t)) for t in targets])}


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    for i, row in enumerate(d["rows"]):
        source = [t for t, m in zip(out["input_ids"][i].tolist(), out["attention_mask"][i].tolist()) if m][:-1]
        target = [t for t in out["labels"][i].tolist() if t != -100][:-1]
        text = []
        for t in source:
            if t >= 40:
                j = target.index(t) + 1
                while target[j] < 40:
                    text.append(target[j]); j += 1
            else:
                text.append(t)
        assert text == row["input_ids"]
        print("length", len(text), "source", len(source) + 1, "target", len(target) + 1)
