"""Masked-language collator with the 80/10/10 rule. A tenth of the trained positions shows the right answer in the input (a naive checker sees a leak) and another tenth a random token; BERT (Devlin et al. 2018) does so to reduce the mismatch to fine-tuning, redrawn each epoch as in RoBERTa."""
FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of {'id': whole number, 'epoch': whole number, 'ids': list of token ids beginning with CLS=1 and ending with SEP=2}"}
SETTINGS = {"share": "share of ordinary tokens that are trained, 0.15", "seed": "seed, 11", "vocab": "size of the vocabulary, 50 (0 pad, 1 CLS, 2 SEP, 3 MASK, ordinary 4..49)"}
NOTES = ("Output: input_ids, labels, attention_mask, padded on the right with 0 / -100 / 0. Labels are at the same position (no shift: masked LM). Of the trained positions 80 % become MASK, 10 % a random ordinary "
         "token (which may be the same token by chance), 10 % remain. CLS, SEP and pad are never trained. Random numbers depend on (seed, epoch, id) only, not on the other rows of the batch. A short row may have no trained position.")
import random
import torch


def right(rows, share=0.15, seed=11, vocab=50):
    width = max(len(r["ids"]) for r in rows)
    inp = torch.zeros(len(rows), width, dtype=torch.long)
    lab = torch.full((len(rows), width), -100)
    att = torch.zeros(len(rows), width, dtype=torch.long)
    for i, r in enumerate(rows):
        rng = random.Random(f"{seed}/{r['epoch']}/{r['id']}")
        for j, t in enumerate(r["ids"]):
            inp[i, j], att[i, j] = t, 1
            if t < 4 or rng.random() >= share:
                continue
            lab[i, j] = t
            u = rng.random()
            if u < 0.8:
                inp[i, j] = 3
            elif u < 0.9:
                inp[i, j] = rng.randrange(4, vocab)
    return {"input_ids": inp, "labels": lab, "attention_mask": att}


def make(seed, n=6):
    rng = random.Random(seed)
    return {"rows": [{"id": 100 * seed + i, "epoch": 0, "ids": [1] + [rng.randrange(4, 50) for _ in range(rng.randint(3, 30))] + [2]} for i in range(n)]}


if __name__ == "__main__":
    rows = make(0, 1500)["rows"]
    o = right(rows)
    raw = torch.nn.utils.rnn.pad_sequence([torch.tensor(r["ids"]) for r in rows], batch_first=True)
    tr = o["labels"] != -100
    n, ordinary = tr.sum().item(), (raw > 3).sum().item()
    masked = (o["input_ids"][tr] == 3).float().mean().item()
    same = (o["input_ids"][tr] == raw[tr]).float().mean().item()
    assert (o["labels"][tr] == raw[tr]).all() and (o["input_ids"][~tr] == raw[~tr]).all() and (raw[tr] > 3).all()
    assert abs(n / ordinary - 0.15) < 0.01 and abs(masked - 0.8) < 0.03 and abs(same - 0.1 - 0.1 / 46) < 0.02
    a, b = right(rows[:1]), right(rows[:3])
    w = a["labels"].shape[1]
    assert (b["labels"][0, :w] == a["labels"][0]).all() and (o["attention_mask"].sum(1) == torch.tensor([len(r["ids"]) for r in rows])).all()
    emb = torch.nn.Embedding(50, 50)
    loss = torch.nn.functional.cross_entropy(emb(o["input_ids"]).flatten(0, 1), o["labels"].flatten())
    loss.backward(); assert emb.weight.grad.norm() > 0
    print("trained share", n / ordinary, "of these MASK", masked, "unchanged", same, "loss", loss.item())
