"""Goldfish labels. About a quarter of ordinary tokens is removed from the labels, picked by a hash of the preceding tokens and not at random: the same passage loses the same tokens each time, so it can never be learnt by heart. Hans et al. 2024, "Be like a goldfish, don't memorize!"."""
FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of {'ids': non-empty list of token ids from 1 on}"}
SETTINGS = {"k": "one token in k is dropped, 4", "h": "number of preceding tokens that are hashed, 5"}
NOTES = ("Output: input_ids (0 pad, right), labels (-100 on padding and on dropped tokens), attention_mask. Inputs are not changed, dropped tokens still serve as context. Labels not shifted (the loss shifts). A token is dropped when the hash of its h predecessors is 0 mod k; "
         "the first h tokens of a row are never dropped. No random numbers: same mask in each epoch, on each rank, at each offset. Loss: mean over kept tokens.")
import torch


def drop(context, k):
    x = 1469598103934665603
    for t in context:                                     # FNV-1a over the token ids, then mixed
        x = ((x ^ t) * 1099511628211) % (1 << 64)
    x ^= x >> 33
    x = (x * 0xFF51AFD7ED558CCD) % (1 << 64)
    return (x >> 32) % k == 0


def right(rows, k=4, h=5):
    w = max(len(r["ids"]) for r in rows)
    inp, att = torch.zeros(len(rows), w, dtype=torch.long), torch.zeros(len(rows), w, dtype=torch.long)
    lab = torch.full((len(rows), w), -100)
    for i, r in enumerate(rows):
        x = r["ids"]
        inp[i, :len(x)], att[i, :len(x)] = torch.tensor(x), 1
        lab[i, :len(x)] = torch.tensor([-100 if j >= h and drop(x[j - h:j], k) else t for j, t in enumerate(x)])
    return {"input_ids": inp, "labels": lab, "attention_mask": att}


def make(seed, n=6, low=3):
    import random
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randrange(1, 50) for _ in range(rng.randint(low, 60))]} for _ in range(n)]}


if __name__ == "__main__":
    o = right(make(0, 400)["rows"])
    a = o["attention_mask"].bool().clone(); a[:, :5] = False
    share = (o["labels"][a] == -100).float().mean().item()
    assert abs(share - 0.25) < 0.02 and (o["labels"][:, :3] != -100).all()
    p = make(1, 1, 60)["rows"][0]["ids"]                  # one passage at two offsets
    q = right([{"ids": p}, {"ids": [7, 9, 11] + p}])["labels"]
    n = len(p)
    assert (q[0, 5:n] == q[1, 8:n + 3]).all() and (q[0, 5:n] == -100).any()
    emb = torch.nn.Embedding(50, 50)
    loss = torch.nn.functional.cross_entropy(emb(o["input_ids"])[:, :-1].flatten(0, 1), o["labels"][:, 1:].flatten()); loss.backward()
    assert emb.weight.grad.norm() > 0
    print("share dropped", share, "same mask at both offsets, loss", loss.item())
