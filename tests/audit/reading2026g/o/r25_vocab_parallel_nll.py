"""Mean NLL with the vocabulary split over ranks. Each rank sees the logits of its own slice only: first the maximum over ranks, then the sum of exponentials, then the target's logit, which all ranks but its owner report as 0. The last ranks may hold padding columns of -inf only. Megatron-LM's vocab_parallel_cross_entropy."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list, per rank {'logits': [tokens, columns] for ids rank*columns .. (rank+1)*columns - 1, 'target': [tokens] GLOBAL ids, same on all ranks, 'mask': [tokens] 1 where scored, same on all ranks}"}
SETTINGS = {}
NOTES = "Mean over scored tokens (they are not split over ranks, so the token count is NOT summed over ranks). The vocabulary is padded to a multiple of the ranks; padded columns are -inf and no target. Needs equal columns on all ranks. Targets outside the mask may be -100. Twin: single(whole logits, target, mask)."
import torch


def right(ranks):
    cols = ranks[0]["logits"].shape[1]
    target, mask = ranks[0]["target"], ranks[0]["mask"].bool()
    top = torch.stack([r["logits"].double().max(1).values for r in ranks]).amax(0)                    # all_reduce(MAX)
    total = sum((r["logits"].double() - top[:, None]).exp().sum(1) for r in ranks)                     # all_reduce(SUM)
    own = 0
    for rank, r in enumerate(ranks):                                                                  # all_reduce(SUM)
        here = (target >= rank * cols) & (target < (rank + 1) * cols)
        pick = r["logits"].double().gather(1, (target - rank * cols).where(here, torch.zeros_like(target))[:, None])[:, 0]
        own = own + torch.where(here, pick - top, torch.zeros_like(pick))
    return (total.log() - own)[mask].mean().item()


def single(logits, target, mask):
    m = mask.bool()
    return torch.nn.functional.cross_entropy(logits[m].double(), target[m]).item()


def make(seed, vocab=30, world=4):
    g = torch.Generator().manual_seed(seed)
    cols = 10                                                       # 40 columns: the last rank is padding only
    x = 5 * torch.randn(12, vocab, generator=g) + 200
    y = torch.randint(0, vocab, (12,), generator=g)
    m = (torch.rand(12, generator=g) < 0.7).long(); m[0] = 1
    y = torch.where(m.bool(), y, torch.full_like(y, -100))
    full = torch.nn.functional.pad(x, (0, cols * world - vocab), value=float("-inf"))
    return {"ranks": [{"logits": p, "target": y, "mask": m} for p in full.split(cols, 1)], "whole": (x, y, m)}


if __name__ == "__main__":
    for s in range(10):
        for v in (30, 27, 40):
            d = make(s, v)
            a, b = right(d["ranks"]), single(*d["whole"])
            assert abs(a - b) < 1e-9 and len(d["ranks"]) == 4
    print("over ranks", a, "one process", b)
