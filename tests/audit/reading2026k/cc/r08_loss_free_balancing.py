"""Balancing without a loss (DeepSeek-V3; arXiv 2408.15664; torchtitan): a bias per expert is added to the router scores for the choice of the experts only, the gate weights come
from the scores without it. The bias has no gradient and is in no optimizer group; once per optimizer step, after the optimizer, it is moved by a constant step against the sign of the load, recentred
to mean zero as in torchtitan. The count is taken over all micro-batches of the step."""
FAMILY = "moe"
KIND = "update"
INPUTS = {"model": "tiny MoE regression model with buffer expert_bias [experts] (not a parameter)", "optimizer": "AdamW over all parameters",
          "batches": "list of micro-batches of one step, each a dict with x (float, [tokens, width]) and y (float, [tokens, width])"}
SETTINGS = {"bias_step": "size of the move of the bias, 0.01"}
NOTES = ("One optimizer step: squared error, summed over all tokens and columns of all micro-batches and divided by the number of all tokens of all micro-batches (micro-batches may have different numbers of tokens), one optimizer.step(); no clipping. "
         "Then expert_bias += d - mean(d) with d = bias_step * sign(mean load - load), the load being the number of tokens per expert over all micro-batches of this step. "
         "How the tokens are cut into micro-batches, and their order, makes no difference. Returns None; gradients are cleared at the start.")
import torch
import torch.nn as nn
import torch.nn.functional as F

D, E, K = 8, 6, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.Parameter(torch.randn(E, D, D) * 0.3)
        self.register_buffer("expert_bias", torch.zeros(E))

    def forward(self, x):
        s = torch.sigmoid(self.gate(x))
        idx = torch.topk(s + self.expert_bias, K, dim=-1).indices
        w = s.gather(-1, idx)
        w = w / w.sum(-1, keepdim=True)
        y = x
        for e in range(E):
            y = y + (w * (idx == e)).sum(-1, keepdim=True) * torch.tanh(x @ self.experts[e])
        return y, F.one_hot(idx, E).sum((0, 1)).float()


def make(seed):
    torch.manual_seed(seed)
    model = Model()
    model.expert_bias.copy_(torch.randn(E) * 0.02)
    batches = [{"x": torch.randn(n, D) + 0.5, "y": torch.randn(n, D)} for n in (10, 7, 13)]
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "batches": batches}


def right(model, optimizer, batches, bias_step=0.01):
    optimizer.zero_grad()
    tokens = sum(len(b["x"]) for b in batches)
    load = torch.zeros_like(model.expert_bias)
    for b in batches:
        out, n = model(b["x"])
        ((out - b["y"]).pow(2).sum() / tokens).backward()
        load += n
    optimizer.step()
    with torch.no_grad():
        d = bias_step * torch.sign(load.mean() - load)
        model.expert_bias += d - d.mean()


if __name__ == "__main__":
    x, z = make(0), make(0)
    right(**x)
    one = {"x": torch.cat([b["x"] for b in z["batches"]]), "y": torch.cat([b["y"] for b in z["batches"]])}
    m, o = z["model"], z["optimizer"]
    s = torch.sigmoid(m.gate(one["x"]))
    load = [0] * E
    for t in range(30):
        for e in sorted(range(E), key=lambda e: -float((s[t] + m.expert_bias)[e]))[:K]:
            load[e] += 1
    (m(one["x"])[0] - one["y"]).pow(2).sum().div(30).backward()
    o.step()
    d = [0.01 * ((sum(load) / E > n) - (sum(load) / E < n)) for n in load]
    want = m.expert_bias + torch.tensor([v - sum(d) / E for v in d])
    print(load, x["model"].expert_bias)
    assert torch.allclose(x["model"].expert_bias, want, atol=1e-6)
    assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(x["model"].parameters(), m.parameters()))
