"""T5 span corruption: sentinels counted down from the end of the vocabulary. Raffel et al. 2020; t5's random_spans_helper and transformers' run_t5_mlm_flax.
Each masked span becomes one sentinel in the input, and the target lists sentinel + span for all spans, then the end token. Input and target have different lengths, neither equals the row's length, and most target tokens do not appear in the input at all."""
import torch
FAMILY = "data"
KIND = "collator"
INPUTS = {"rows": "list of row dicts with ids (list of token ids 2..39) and spans (list of (start, end), sorted, not adjacent, not empty)"}
SETTINGS = {}
NOTES = "Encoder-decoder. Returns input_ids, attention_mask, labels (-100 on padding), decoder_input_ids (labels shifted right, start token = pad id 0, padding 0). End token 1 closes input and target. Sentinel k is 49 - k. The spans are drawn by the data stage before. decoder_input_ids line up with labels, the loss does not shift. Any number of rows."
PAD, EOS, TOP = 0, 1, 49


def make(seed):
    g = torch.Generator().manual_seed(seed)
    r = lambda n: torch.randint(2, 40, (n,), generator=g).tolist()
    return {"rows": [{"ids": r(10), "spans": [(2, 4), (7, 8)]}, {"ids": r(7), "spans": [(0, 2)]}, {"ids": r(9), "spans": [(1, 2), (4, 6), (8, 9)]}]}


def _pad(rows, value):
    w = max(map(len, rows))
    return torch.tensor([r + [value] * (w - len(r)) for r in rows])


def right(rows):
    xs, ys = [], []
    for r in rows:
        x, y, at = [], [], 0
        for k, (a, b) in enumerate(r["spans"]):
            x += r["ids"][at:a] + [TOP - k]
            y += [TOP - k] + r["ids"][a:b]
            at = b
        xs.append(x + r["ids"][at:] + [EOS])
        ys.append(y + [EOS])
    labels = _pad(ys, -100)
    inputs = _pad(xs, PAD)
    dec = torch.cat([torch.full((len(rows), 1), PAD), labels[:, :-1]], 1)
    return {"input_ids": inputs, "attention_mask": (inputs != PAD).long(), "labels": labels, "decoder_input_ids": dec.masked_fill(dec == -100, PAD)}


if __name__ == "__main__":
    rows = make(0)["rows"]
    b = right(rows)
    for i, r in enumerate(rows):                      # put the spans back and compare
        x = [t for t in b["input_ids"][i].tolist() if t not in (PAD, EOS)]
        y = [t for t in b["labels"][i].tolist() if t not in (-100, EOS)]
        fill, cur = {}, None
        for t in y:
            if t >= 40:
                cur = t
                fill[cur] = []
            else:
                fill[cur].append(t)
        back = [u for t in x for u in (fill[t] if t >= 40 else [t])]
        assert back == r["ids"]
    print(b["input_ids"].tolist()); print(b["labels"].tolist())
    assert torch.equal(b["decoder_input_ids"][:, 1:], b["labels"][:, :-1].masked_fill(b["labels"][:, :-1] == -100, 0))
