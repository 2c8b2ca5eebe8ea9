"""T5 span corruption: each masked span becomes ONE sentinel, sentinels count DOWN from the top of the vocabulary, and the target holds sentinel + the removed tokens + a closing sentinel.
The input is not aligned with the labels (Raffel et al. 2020). Decoder inputs are the labels shifted right with pad as the start token."""
FAMILY = "collator"
KIND = "collator"
INPUTS = {"rows": "list of dict ids (list of token ids below 40), spans (list of (start, length), sorted, not touching)"}
SETTINGS = {"vocab": "50; sentinels 49, 48, …", "pad": "0, also the decoder's first input", "eos": "1"}
NOTES = "Deterministic given the spans. labels are -100 where padded, decoder_input_ids pad there. Deleted text and input rebuild the row. Row order kept."
import torch, random

def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(2, 40) for _ in range(n)], "spans": s} for n, s in [(12, [(1, 3), (7, 2)]), (8, [(0, 2)]), (10, [(2, 1), (5, 1), (8, 2)])]]}

def right(rows, vocab=50, pad=0, eos=1):
    ins, tgts = [], []
    for row in rows:
        a, b, at = [], [], 0
        for k, (s, n) in enumerate(row["spans"]):
            sent = vocab - 1 - k
            a += row["ids"][at:s] + [sent]; b += [sent] + row["ids"][s:s + n]; at = s + n
        ins.append(a + row["ids"][at:] + [eos]); tgts.append(b + [vocab - 1 - len(row["spans"]), eos])
    L, M = max(map(len, ins)), max(map(len, tgts))
    ids = torch.tensor([x + [pad] * (L - len(x)) for x in ins])
    att = torch.tensor([[1] * len(x) + [0] * (L - len(x)) for x in ins])
    lab = torch.tensor([x + [-100] * (M - len(x)) for x in tgts])
    dec = torch.cat([torch.full((len(rows), 1), pad), lab[:, :-1]], 1).masked_fill_(torch.cat([torch.zeros(len(rows), 1).bool(), lab[:, :-1] == -100], 1), pad)
    return {"input_ids": ids, "attention_mask": att, "labels": lab, "decoder_input_ids": dec}

if __name__ == "__main__":
    rows = make(0)["rows"]; o = right(rows)
    for i, row in enumerate(rows):
        fill, cur = {}, None
        for t in o["labels"][i].tolist():
            if t in (1, -100): continue
            if t >= 40: cur = t; fill[t] = []
            else: fill[cur].append(t)
        back = []
        for t, m in zip(o["input_ids"][i].tolist(), o["attention_mask"][i].tolist()):
            if m and t != 1: back += fill[t] if t >= 40 else [t]
        assert back == row["ids"]
    print(o["input_ids"], o["labels"], o["decoder_input_ids"], sep="\n")
