"""Whole-word BERT masking, 80/10/10. Some positions are trained although the input still shows their right token, and some show a random token; that is BERT's recipe (Devlin et al. 2019), with words chosen whole and each piece drawn on its own as in HF's whole-word collator."""
import random
import torch
FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of rows {'index': int, 'ids': list of ids with [CLS]=1 first and [SEP]=2 last, 'word': word number of each token, -1 for special tokens}"}
SETTINGS = {"rate": "share of words chosen, 0.15", "mask_id": "3", "pad_id": "0", "vocab": "random tokens come from 4..vocab-1, 50", "epoch": "changes the draws (dynamic masking), 0"}
NOTES = "labels hold the original token at chosen positions, -100 elsewhere (not shifted: masked language model). Right padding, attention_mask 1 for real tokens. At least one word per row is chosen. Draws depend on epoch and row index only, not on the other rows. A random token may equal the original."
def make(seed):
    r = random.Random(seed)
    rows = []
    for i in range(5):
        ids, word = [1], [-1]
        for w in range(r.randrange(5, 25)):
            for _ in range(r.choice([1, 1, 2, 3])):
                ids.append(r.randrange(4, 50)); word.append(w)
        rows.append({"index": i, "ids": ids + [2], "word": word + [-1]})
    return {"rows": rows}
def right(rows, rate=0.15, mask_id=3, pad_id=0, vocab=50, epoch=0):
    width = max(len(row["ids"]) for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    labels = torch.full((len(rows), width), -100)
    attention = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        r = random.Random(f"{epoch}/{row['index']}")
        words = sorted(set(row["word"]) - {-1})
        chosen = set(r.sample(words, max(1, round(rate * len(words)))))
        for t, (token, word) in enumerate(zip(row["ids"], row["word"])):
            ids[i, t], attention[i, t] = token, 1
            if word in chosen:
                labels[i, t] = token
                u = r.random()
                if u < 0.8:
                    ids[i, t] = mask_id
                elif u < 0.9:
                    ids[i, t] = r.randrange(4, vocab)
    return {"input_ids": ids, "labels": labels, "attention_mask": attention}
if __name__ == "__main__":
    n = {"mask": 0, "same": 0, "other": 0}
    for seed in range(20):
        rows = make(seed)["rows"]
        for e in range(10):
            b = right(rows, epoch=e)
            for i, row in enumerate(rows):
                L = len(row["ids"])
                on = [b["labels"][i, t].item() != -100 for t in range(L)]
                words = {w for w, o in zip(row["word"], on) if o}
                assert -1 not in words and len(words) == max(1, round(0.15 * len(set(row["word"]) - {-1})))
                assert on == [w in words for w in row["word"]] and (b["labels"][i, L:] == -100).all() and b["attention_mask"][i].sum() == L
                for t in range(L):
                    x = b["input_ids"][i, t].item()
                    if not on[t]: assert x == row["ids"][t]
                    else:
                        assert b["labels"][i, t] == row["ids"][t]
                        n["mask" if x == 3 else "same" if x == row["ids"][t] else "other"] += 1
    tot = sum(n.values())
    assert abs(n["mask"] / tot - 0.8) < 0.03 and abs(n["same"] / tot - 0.1) < 0.03
    alone = right(rows[:1], epoch=9)["input_ids"][0]
    assert (alone == b["input_ids"][0, :len(alone)]).all()
    print("ok", {k: round(v / tot, 3) for k, v in n.items()})
