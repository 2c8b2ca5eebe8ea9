"""T5 span corruption in the collator: input and target have different, but always the same, lengths, so nothing is ever padded. The raw length is chosen backwards so that
the corrupted input has exactly the wanted length; by construction (T5 random_spans_noise_mask) a row starts with a kept span and ENDS with a noise span."""
FAMILY = "data stages and collators"
KIND = "collator"
INPUTS = {"rows": "list of dicts: 'ids' (raw token ids, all of length 40), 'index' (number of the row in the data set)"}
SETTINGS = {"density": "noise density, 0.15", "mean_span": "mean length of a noise span, 3", "raw": "raw length, 40 (gives input 37 and labels 9)", "epoch": "0; seeds the spans together with index"}
NOTES = ("Random, but a function of (epoch, index) alone: independent of batch, order and worker. 40 raw tokens -> 6 noise tokens in 2 spans -> 34 kept + 2 sentinels + EOS = 37 input ids; 6 + 2 + EOS = 9 labels. "
         "Sentinels count DOWN from 99, same in input and labels; there is no closing sentinel. decoder_input_ids are the labels shifted right with the pad id 0 as start token. No -100: all labels are trained. ValueError for another raw length.")
import random
import torch

EOS, PAD, SENTINEL = 1, 0, 99


def _parts(r, total, n):
    """total as an ordered sum of n positive numbers, uniformly."""
    cut = sorted(r.sample(range(1, total), n - 1))
    return [b - a for a, b in zip([0] + cut, cut + [total])]


def right(rows, density=0.15, mean_span=3.0, raw=40, epoch=0):
    noise = min(max(round(raw * density), 1), raw - 1)
    spans = max(round(noise / mean_span), 1)
    ins, outs = [], []
    for row in rows:
        ids = list(row["ids"])
        if len(ids) != raw:
            raise ValueError("raw length")
        r = random.Random("%d/%d" % (epoch, row["index"]))
        lost, kept = _parts(r, noise, spans), _parts(r, raw - noise, spans)
        a, b, t = [], [], 0
        for k in range(spans):
            a += ids[t:t + kept[k]] + [SENTINEL - k]
            t += kept[k]
            b += [SENTINEL - k] + ids[t:t + lost[k]]
            t += lost[k]
        ins.append(a + [EOS])
        outs.append(b + [EOS])
    labels = torch.tensor(outs)
    start = torch.full((len(rows), 1), PAD)
    return {"input_ids": torch.tensor(ins), "labels": labels, "decoder_input_ids": torch.cat([start, labels[:, :-1]], 1)}


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randint(2, 49) for _ in range(40)], "index": r.randrange(10 ** 6)} for _ in range(4)]}


if __name__ == "__main__":
    hits = [0] * 40
    for seed in range(200):
        rows = make(seed)["rows"]
        b = right(rows)
        assert b["input_ids"].shape == (4, 37) and b["labels"].shape == (4, 9)
        for i, row in enumerate(rows):
            fill, key = {}, None
            for t in b["labels"][i].tolist()[:-1]:
                if t >= 90:
                    key = t
                    fill[key] = []
                else:
                    fill[key].append(t)
            back = []
            for t in b["input_ids"][i].tolist()[:-1]:
                if t < 90:
                    back.append(t)
                else:
                    for u in fill[t]:
                        hits[len(back)] += 1
                        back.append(u)
            assert back == row["ids"]
            assert b["decoder_input_ids"][i].tolist() == [0] + b["labels"][i].tolist()[:-1]
            alone = right([row])
            assert torch.equal(alone["input_ids"][0], b["input_ids"][i])
        assert not torch.equal(right(rows, epoch=1)["input_ids"], b["input_ids"])
    assert hits[0] == 0 and hits[39] == 800 and sum(hits) == 6 * 800
    print("ok lossless; noise at the last token always, at the first never; density", sum(hits) / 800 / 40)
