"""Auxiliary-loss-free balancing (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3): a bias per expert that has no gradient, is used only to choose experts and is moved by a fixed step after each optimizer step."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "mixture of experts"
KIND = "update"
INPUTS = {"model": "classifier with one MoE layer; buffer expert_bias [experts]", "optimizer": "plain SGD over the model's parameters", "batches": "list of micro-batches of one optimizer step, dicts with x [tokens, width] and y [tokens]"}
SETTINGS = {"u": "step of the bias, 0.01", "topk": "experts per token, 2"}
NOTES = ("One optimizer step over all micro-batches: loss = sum of cross entropies of all tokens of all micro-batches / number of all tokens. Experts are chosen by top-k of sigmoid score + expert_bias; the gate weights are the sigmoid scores WITHOUT the bias of the chosen experts, divided by their sum. "
         "expert_bias gets no gradient and is not known to the optimizer. After optimizer.step, expert_bias_e += u * sign(mean load - load_e), the loads counted over all micro-batches of the step under the old bias; only the sign counts, not the size of the imbalance. There is no auxiliary loss.")

class MoE(nn.Module):
    def __init__(self, width=10, experts=5, classes=6):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, classes)
        self.register_buffer("expert_bias", torch.zeros(experts))
    def forward(self, x, topk):
        s = torch.sigmoid(self.router(x))
        idx = (s + self.expert_bias).topk(topk, -1).indices
        w = s.gather(-1, idx)
        w = w / w.sum(-1, keepdim=True)
        out = torch.stack([torch.tanh(f(x)) for f in self.experts], 1)
        h = (out.gather(1, idx[..., None].expand(-1, -1, x.shape[-1])) * w[..., None]).sum(1)
        return self.head(h), torch.bincount(idx.flatten(), minlength=len(self.expert_bias))

def make(seed):
    torch.manual_seed(seed)
    m = MoE()
    m.expert_bias.copy_(torch.randn(5) * 0.02)
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.3), "batches": [{"x": torch.randn(n, 10), "y": torch.randint(0, 6, (n,))} for n in (9, 14, 7)]}

def right(model, optimizer, batches, u=0.01, topk=2):
    total = sum(len(b["y"]) for b in batches)
    load = torch.zeros_like(model.expert_bias)
    optimizer.zero_grad()
    for b in batches:
        logits, counts = model(b["x"], topk)
        (F.cross_entropy(logits, b["y"], reduction="sum") / total).backward()
        load += counts
    optimizer.step()
    with torch.no_grad():
        model.expert_bias += u * torch.sign(load.mean() - load)

if __name__ == "__main__":
    import copy
    d = make(0); e = copy.deepcopy(d); old = d["model"].expert_bias.clone(); right(**d)
    m = e["model"]; x, y = (torch.cat([b[k] for b in e["batches"]]) for k in "xy")
    load = [0] * 5; loss = 0.0
    for i in range(len(x)):
        s = torch.sigmoid(m.router(x[i])); ch = sorted(range(5), key=lambda j: -(s[j] + old[j]).item())[:2]
        for j in ch: load[j] += 1
        z = sum(s[j] for j in ch); loss = loss + F.cross_entropy(m.head(sum(s[j] / z * torch.tanh(m.experts[j](x[i])) for j in ch)), y[i])
    (loss / len(x)).backward(); e["optimizer"].step()
    want = old + 0.01 * torch.tensor([float((sum(load) / 5 > c) - (sum(load) / 5 < c)) for c in load])
    diff = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), m.parameters()))
    print("load", load, "bias error", (d["model"].expert_bias - want).abs().max().item(), "weight error", diff); assert diff < 1e-5 and torch.allclose(d["model"].expert_bias, want)
