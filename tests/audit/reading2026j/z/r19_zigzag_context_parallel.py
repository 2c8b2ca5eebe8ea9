"""Zig-zag context parallelism (Llama 3, ring-flash-attention): with n ranks the sequence is cut into 2n chunks and rank r holds chunks r and 2n-1-r, so causal work is equal. Labels are shifted BEFORE the cut, the causal mask compares
global positions and never indices, and the gathered keys stay in rank order: the sequence looks scrambled, the loss is the same."""
import torch, torch.nn.functional as F
FAMILY = "packing and positions"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of dicts: q, k, v [local time, d], labels [local time] (already shifted: the NEXT token of the global sequence; -100 = not trained, also at the very last token), position [local time] global positions, head [d, V] (the same on all ranks)",
          "full": "the same dict for the whole sequence in one process, for the twin only"}
SETTINGS = {}
NOTES = ("Number: mean next-token nll over all trained tokens of the whole sequence = sum of the ranks' sums / sum of the ranks' counts (counts differ between ranks; a rank may have none). The time must be a multiple of 2 * ranks. "
         "Nothing is shifted in the loss. q has its rotary positions applied before. Single-process twin: twin(full).")

def make(seed, n=3, T=24, d=8, V=20):
    g = torch.Generator().manual_seed(seed); ids = torch.randint(0, V, (T,), generator=g)
    lab = torch.cat([ids[1:], torch.tensor([-100])]); lab[: T // 3] = -100                    # a long prompt: rank 0's first chunk has no targets
    full = {k: torch.randn(T, d, generator=g, dtype=torch.float64) for k in "qkv"}
    full |= {"labels": lab, "position": torch.arange(T), "head": torch.randn(d, V, generator=g, dtype=torch.float64)}
    c = torch.arange(T).view(2 * n, -1); ranks = []
    for r in range(n):
        idx = torch.cat([c[r], c[2 * n - 1 - r]])
        ranks.append({k: (v if k == "head" else v[idx]) for k, v in full.items()})
    return {"ranks": ranks, "full": full}

def right(ranks):
    K = torch.cat([r["k"] for r in ranks]); V = torch.cat([r["v"] for r in ranks]); pos = torch.cat([r["position"] for r in ranks])    # all-gather, in rank order
    tot, cnt = 0.0, 0
    for r in ranks:
        s = (r["q"] @ K.T) * K.shape[-1] ** -0.5
        s = s.masked_fill(pos[None, :] > r["position"][:, None], float("-inf"))
        logits = (s.softmax(-1) @ V) @ r["head"]
        tot = tot + F.cross_entropy(logits, r["labels"], ignore_index=-100, reduction="sum"); cnt += int((r["labels"] != -100).sum())
    return tot / max(cnt, 1)                                                                      # all-reduce of both

def twin(full):
    o = F.scaled_dot_product_attention(full["q"][None], full["k"][None], full["v"][None], is_causal=True)[0]
    return F.cross_entropy(o @ full["head"], full["labels"], ignore_index=-100)

if __name__ == "__main__":
    D = make(0); full = D["full"]; a, b = right(D["ranks"]), twin(full); s = n = 0
    for t in range(24):
        if full["labels"][t] < 0: continue
        w = torch.softmax(torch.stack([full["q"][t] @ full["k"][j] / 8 ** 0.5 for j in range(t + 1)]), 0)
        s += -((w @ full["v"][: t + 1]) @ full["head"]).log_softmax(-1)[full["labels"][t]].item(); n += 1
    print(a.item(), b.item(), s / n, "counts per rank", [int((r["labels"] != -100).sum()) for r in D["ranks"]], "positions of rank 0", D["ranks"][0]["position"].tolist())
    assert abs(a - b) < 1e-10 and abs(a.item() - s / n) < 1e-10
    for k in "qkv": full[k].requires_grad_(True)
    c = torch.arange(24).view(6, -1); rk = [{k: (v if k == "head" else v[torch.cat([c[r], c[5 - r]])]) for k, v in full.items()} for r in range(3)]
    ga = torch.autograd.grad(right(rk), [full[k] for k in "qkv"]); gb = torch.autograd.grad(twin(full), [full[k] for k in "qkv"])
    e = max((x - y).abs().max().item() for x, y in zip(ga, gb)); print("gradient difference", e, "norm", ga[0].norm().item()); assert e < 1e-10 and min(x.norm() for x in ga) > 0
