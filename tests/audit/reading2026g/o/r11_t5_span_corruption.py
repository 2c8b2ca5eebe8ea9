"""T5 span corruption. Sentinels count DOWN from the end of the vocabulary, the labels begin with a sentinel, and the decoder starts with the PAD token, which here is a real input and not padding; Raffel et al. 2020 (random_spans_noise_mask, decoder_start_token_id = pad_token_id)."""
FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of {'id': whole number, 'ids': at least 4 ordinary token ids 2..39}"}
SETTINGS = {"density": "share of corrupted tokens, 0.3", "mean_span": "mean length of a corrupted span, 3", "seed": "seed, 5", "top": "id of the first sentinel, 49 (next 48, 47, ...)"}
NOTES = ("Output: input_ids, attention_mask, labels, decoder_input_ids. PAD=0, EOS=1. Encoder input: kept spans each followed by its sentinel, EOS. Labels: sentinel, the removed span, sentinel, ..., EOS; padding -100. "
         "decoder_input_ids = labels shifted right with PAD in front (already shifted: the loss does not shift again). Rows begin with a kept span and end with a removed one, hence no closing sentinel, as in the T5 code. Each row's randomness is from (seed, id). At most 10 spans per row.")
import random
import torch


def split(total, parts, rng):
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0] + cuts, cuts + [total])]


def one(row, density, mean_span, seed, top):
    rng = random.Random(f"{seed}/{row['id']}")
    ids, n = row["ids"], len(row["ids"])
    noise = min(max(round(n * density), 1), n - 1)
    spans = min(max(round(noise / mean_span), 1), noise, n - noise)
    if spans > top - 39:
        raise ValueError("row too long: not enough sentinels")
    keep, drop = split(n - noise, spans, rng), split(noise, spans, rng)
    enc, dec, at = [], [], 0
    for i, (k, d) in enumerate(zip(keep, drop)):
        enc += ids[at:at + k] + [top - i]
        dec += [top - i] + ids[at + k:at + k + d]
        at += k + d
    return enc + [1], dec + [1]


def right(rows, density=0.3, mean_span=3, seed=5, top=49):
    pairs = [one(r, density, mean_span, seed, top) for r in rows]
    we, wd = max(len(e) for e, _ in pairs), max(len(d) for _, d in pairs)
    inp, att = torch.zeros(len(rows), we, dtype=torch.long), torch.zeros(len(rows), we, dtype=torch.long)
    lab, din = torch.full((len(rows), wd), -100), torch.zeros(len(rows), wd, dtype=torch.long)
    for i, (e, d) in enumerate(pairs):
        inp[i, :len(e)], att[i, :len(e)] = torch.tensor(e), 1
        lab[i, :len(d)] = torch.tensor(d)
        din[i, 1:len(d)] = torch.tensor(d[:-1])
    return {"input_ids": inp, "attention_mask": att, "labels": lab, "decoder_input_ids": din}


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"id": i, "ids": [rng.randrange(2, 40) for _ in range(rng.randint(4, 40))]} for i in range(8)]}


if __name__ == "__main__":
    for seed in range(30):
        rows = make(seed)["rows"]
        o = right(rows)
        for i, r in enumerate(rows):
            lab = [t for t in o["labels"][i].tolist() if t != -100]
            assert lab[0] == 49 and lab[-1] == 1
            fill, cur = {}, None
            for t in lab[:-1]:
                if t >= 40:
                    cur = fill[t] = []
                else:
                    cur.append(t)
            back = []
            for t in o["input_ids"][i][o["attention_mask"][i].bool()].tolist()[:-1]:
                back += fill[t] if t >= 40 else [t]
            assert back == r["ids"], "not invertible"
            assert sum(map(len, fill.values())) == min(max(round(len(back) * 0.3), 1), len(back) - 1)
            assert o["decoder_input_ids"][i, 0] == 0 and o["decoder_input_ids"][i, 1:len(lab)].tolist() == lab[:-1]
    print("30 batches invertible; first row of the last:", o["input_ids"][0].tolist(), o["labels"][0].tolist())
