"""T5 span corruption: inputs and targets are complementary, both carry the sentinels, and the sentinels count DOWN from the end of the vocabulary (extra_id_0 is the largest id). The target ends with EOS and labels pad with -100, while decoder inputs are the labels shifted right with pad 0 as the start token (Raffel et al. 2020)."""
import torch

FAMILY = "collators"
KIND = "collator"
INPUTS = {"rows": "list of dicts: 'ids' list of token ids in 2..39, 'spans' list of (start, end) sorted, apart and not touching"}
SETTINGS = {"first_sentinel": "49 (then 48, 47, ...)", "eos": "1", "pad": "0"}
NOTES = "Deterministic: the spans are drawn before. The lengths of inputs and targets differ. Labels: -100 on padding. decoder_input_ids start with pad = 0."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n in (12, 9):
        a = int(torch.randint(0, 3, (1,), generator=g))
        b = int(torch.randint(6, 8, (1,), generator=g))
        rows.append({"ids": torch.randint(2, 40, (n,), generator=g).tolist(), "spans": [(a, a + 2), (b, n - 1 if b < n - 1 else n)]})
    return {"rows": rows}


def right(rows, first_sentinel=49, eos=1, pad=0):
    xs, ys = [], []
    for r in rows:
        x, y, at = [], [], 0
        for k, (a, b) in enumerate(r["spans"]):
            s = first_sentinel - k
            x += r["ids"][at:a] + [s]
            y += [s] + r["ids"][a:b]
            at = b
        xs.append(x + r["ids"][at:] + [eos])
        ys.append(y + [eos])
    nx, ny = max(map(len, xs)), max(map(len, ys))
    labels = torch.tensor([y + [-100] * (ny - len(y)) for y in ys])
    dec = torch.full_like(labels, pad)
    dec[:, 1:] = labels[:, :-1]
    return {"input_ids": torch.tensor([x + [pad] * (nx - len(x)) for x in xs]),
            "attention_mask": torch.tensor([[1] * len(x) + [0] * (nx - len(x)) for x in xs]),
            "labels": labels, "decoder_input_ids": dec.masked_fill(dec == -100, pad)}


if __name__ == "__main__":
    for seed in range(20):
        rows = make(seed)["rows"]
        out = right(rows)
        for i, r in enumerate(rows):             # put the spans back
            x = out["input_ids"][i][out["attention_mask"][i].bool()].tolist()[:-1]
            y = [t for t in out["labels"][i].tolist() if t != -100][:-1]
            span = {}
            for t in y:
                if t >= 40:
                    key = t; span[key] = []
                else:
                    span[key].append(t)
            assert sum(([t] if t < 40 else span[t] for t in x), []) == r["ids"]
    print("ok", out["input_ids"].tolist(), out["labels"].tolist())
