"""TIES merging (Yadav et al. 2023, arXiv 2306.01708): trim each task vector, elect a sign per entry, average only the models that agree with it. The divisor differs from entry to entry."""
import torch
FAMILY = "merging"
KIND = "state"
INPUTS = {"base": "state dict of the pretrained model", "experts": "list of state dicts of fine-tuned models, same keys"}
SETTINGS = {"density": "share of entries that are kept per model and tensor, 0.4", "lam": "scale of the merged task vector, 1.0"}
NOTES = ("Task vector of a model = its weights - base. (1) Trim: in each tensor keep the round(density * size) entries of largest absolute value, set the others to 0. (2) Elect: the sign of an entry is the sign of the sum over models of the trimmed values (so large values outvote small ones). "
         "(3) Disjoint mean: average the trimmed values of the models that kept the entry and have the elected sign; the divisor is the number of these models, not the number of all models; 0 if there are none. Result = base + lam * merged. The models have equal weights. Returns a new state dict; the inputs are not changed.")

def make(seed):
    torch.manual_seed(seed)
    base = {"w": torch.randn(6, 5), "b": torch.randn(7)}
    return {"base": base, "experts": [{k: v + 0.5 * torch.randn_like(v) for k, v in base.items()} for _ in range(3)]}

def right(base, experts, density=0.4, lam=1.0):
    out = {}
    for key, w in base.items():
        tv = torch.stack([e[key] - w for e in experts]).flatten(1)
        k = round(density * tv.shape[1])
        keep = torch.zeros_like(tv, dtype=torch.bool).scatter(1, tv.abs().topk(k, 1).indices, True)
        tv = tv * keep
        sign = torch.sign(tv.sum(0))
        agree = (torch.sign(tv) == sign) & (tv != 0)
        merged = (tv * agree).sum(0) / agree.sum(0).clamp_min(1)
        out[key] = w + lam * merged.view_as(w)
    return out

if __name__ == "__main__":
    d = make(0); r = right(**d); worst = 0.0
    for key, w in d["base"].items():
        vs = [(e[key] - w).flatten().tolist() for e in d["experts"]]
        for v in vs:
            for i in sorted(range(len(v)), key=lambda i: -abs(v[i]))[round(0.4 * len(v)):]: v[i] = 0.0
        for i, b in enumerate(w.flatten().tolist()):
            s = sum(v[i] for v in vs); ag = [v[i] for v in vs if v[i] * s > 0]
            worst = max(worst, abs(r[key].flatten()[i].item() - b - (sum(ag) / len(ag) if ag else 0)))
    print("largest error against the loop", worst); assert worst < 1e-5
