"""Stochastic beam search (Kool et al. 2019): k sequences WITHOUT replacement. The perturbed score of children is conditioned so that their maximum equals the parent's score; the ranking score is not a log-prob, the returned values are."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "causal model", "prompt": "[1, time]"}
SETTINGS = {"k": "beams, 5", "new": "tokens, 2"}
NOTES = "All k sequences differ. Log-probs are per-token model log-probs; plain means over the k rows are biased (needs the threshold weights of the paper)."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def make(seed):
    torch.manual_seed(seed)
    return {"model": Tiny(), "prompt": torch.randint(2, V, (1, 3)), "settings": {"k": 5, "new": 2}}


@torch.no_grad()
def right(model, prompt, settings):
    ids, phi, G = prompt, torch.zeros(1), torch.zeros(1)
    toks = torch.zeros(1, 0)
    for _ in range(settings["new"]):
        step = model(ids)[:, -1].log_softmax(-1)
        child = phi[:, None] + step
        g = child - torch.log(-torch.log(torch.rand_like(child).clamp(1e-9, 1 - 1e-6)))
        z = g.max(1, keepdim=True).values
        v = G[:, None] - g + torch.log1p(-(g - z).exp().clamp(max=1.0))
        gt = G[:, None] - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
        G, flat = gt.reshape(-1).topk(min(settings["k"], gt.numel()))
        row, tok = flat // V, flat % V
        ids = torch.cat([ids[row], tok[:, None]], 1)
        toks = torch.cat([toks[row], step[row, tok][:, None]], 1)
        phi = child.reshape(-1)[flat]
    return ids, toks


if __name__ == "__main__":
    b = make(0); ids, lps = right(**b)
    ref = b["model"](ids)[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:, None])[..., 0]
    assert torch.allclose(ref, lps, atol=1e-5) and len({tuple(r) for r in ids.tolist()}) == 5
    # the first (best) sequence alone is a fair sample: check its first token
    p = b["model"](b["prompt"])[0, -1].softmax(-1); c = torch.zeros(V); n = 500
    for _ in range(n):
        c[right(b["model"], b["prompt"], {"k": 2, "new": 1})[0][0, 3]] += 1
    gap = (c / n - p).abs().max().item()
    assert gap < 0.07
    print("distinct", len(ids), "gap of the first", gap)
