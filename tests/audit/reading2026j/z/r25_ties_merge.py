"""TIES merging (Yadav et al. 2023, mergekit): each fine-tuned model's difference to the base is trimmed to its largest 20 % by magnitude, a sign is elected per entry by the summed mass, and the mean is taken only over the models that agree with the sign.
The divisor differs from entry to entry and is not the number of models; most entries of the merged model are exactly the base's."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "adapters and merged weights"
KIND = "state"
INPUTS = {"base": "state dict of the common pre-trained model", "tuned": "list of state dicts fine-tuned from it (same keys and shapes)"}
SETTINGS = {"density": "share of entries kept per model, over the whole flattened model, 0.2", "lam": "scale of the merged task vector, 1.0"}
NOTES = ("right(base, tuned, density, lam) returns a state dict of the base's dtypes that loads strictly. Trimming is global over the flattened float entries of a model (authors' code), not per tensor. Sign election by the sum of the trimmed values; an elected sum of exactly 0 takes the majority sign of the non-zero signs (authors' code: resolve_zero_signs), "
         "and no agreeing model leaves the base value. Integer buffers are taken from the base. A tied tensor that has two keys (seen from the shared storage in `base`) is counted and merged once and shared again; a base whose tied keys were copied apart would be trimmed over a larger total. The inputs are not changed; the order of `tuned` does not matter up to rounding.")

class Net(nn.Module):
    def __init__(self, V=11, d=8):
        super().__init__(); self.emb = nn.Embedding(V, d); self.mid = nn.Linear(d, d); self.out = nn.Linear(d, V, bias=False); self.out.weight = self.emb.weight; self.register_buffer("steps", torch.tensor(3))
    def forward(self, ids): return self.out(torch.tanh(self.mid(self.emb(ids))))

def make(seed):
    torch.manual_seed(seed); m = Net(); base = {k: v.clone() for k, v in m.state_dict().items()}; base["out.weight"] = base["emb.weight"]; tuned = []
    for j in range(3):
        n = Net(); n.load_state_dict(base); opt = torch.optim.Adam(n.parameters(), lr=0.01); ids = torch.randint(0, 11, (4, 7))
        for _ in range(5): opt.zero_grad(); F.cross_entropy(n(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward(); opt.step(); n.steps += 1
        tuned.append({k: v.clone() for k, v in n.state_dict().items()})
    return {"base": base, "tuned": tuned}

@torch.no_grad()
def right(base, tuned, density=0.2, lam=1.0):
    owner, keys = {}, []
    for k, v in base.items():
        if not v.is_floating_point(): continue
        o = owner.setdefault((v.data_ptr(), tuple(v.shape), tuple(v.stride())), k)
        if o == k: keys.append(k)
    flat = lambda s: torch.cat([s[k].detach().reshape(-1).float() for k in keys])
    b = flat(base); T = torch.stack([flat(t) - b for t in tuned])
    keep = max(1, int(density * b.numel()))
    thr = T.abs().kthvalue(b.numel() - keep + 1, dim=1, keepdim=True).values
    T = T * (T.abs() >= thr)
    sign = torch.sign(T.sum(0))
    major = torch.sign(sign.sum())
    sign = torch.where(sign == 0, major, sign)
    agree = torch.where(sign > 0, T > 0, T < 0)
    d = (T * agree).sum(0) / agree.sum(0).clamp(min=1)
    merged = b + lam * d
    out, at = {}, 0
    for k in keys: n = base[k].numel(); out[k] = merged[at:at + n].view(base[k].shape).to(base[k].dtype).clone(); at += n
    res = {}
    for k, v in base.items(): res[k] = out[owner[(v.data_ptr(), tuple(v.shape), tuple(v.stride()))]] if v.is_floating_point() else v.clone()
    return res

if __name__ == "__main__":
    D = make(0); base, tuned = D["base"], D["tuned"]; r = right(base, tuned); ks = ["emb.weight", "mid.weight", "mid.bias"]
    b = sum((base[k].flatten().tolist() for k in ks), []); N = len(b); tv = []
    for t in tuned:
        d = [x - y for x, y in zip(sum((t[k].flatten().tolist() for k in ks), []), b)]; top = set(sorted(range(N), key=lambda i: -abs(d[i]))[: int(0.2 * N)]); tv.append([d[i] if i in top else 0.0 for i in range(N)])
    slow = []
    for i in range(N):
        v = [t[i] for t in tv]; s = sum(v); ok = [x for x in v if x * s > 0]; slow.append(b[i] + (sum(ok) / len(ok) if ok else 0.0))
    got = sum((r[k].flatten().tolist() for k in ks), []); e = max(abs(x - y) for x, y in zip(got, slow)); ch = sum(x != y for x, y in zip(got, b))
    n = Net(); n.load_state_dict(r, strict=True); ids = torch.randint(0, 11, (2, 6)); l = F.cross_entropy(n(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()); l.backward()
    print("difference from the loop", e, "changed", ch, "of", N, "tied", r["out.weight"] is r["emb.weight"], "loss", l.item(), "grad", n.mid.weight.grad.norm().item()); assert e < 1e-6 and 0 < ch < 0.61 * N and r["out.weight"] is r["emb.weight"] and int(r["steps"]) == 3 and n.mid.weight.grad.norm() > 0
    p = right(base, tuned[::-1]); assert max((p[k] - r[k]).abs().max().item() for k in ks) < 1e-6
