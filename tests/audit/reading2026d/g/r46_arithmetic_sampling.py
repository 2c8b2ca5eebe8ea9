"""Arithmetic sampling (Vilnis et al. 2023). All rows share ONE random number: row i uses code (u + i/n) mod 1 and walks down the cumulative probabilities, rescaling its code. Each row alone is a fair sample, the rows together are spread out."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "causal model", "prompt": "[1, time], repeated for n rows"}
SETTINGS = {"n": "rows, 8", "new": "tokens, 3"}
NOTES = "Rows are dependent by intent (a group mean has lower variance; leave-one-out baselines are then correlated). Codes in double precision. Log-probs are the model's."
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
    return {"model": Tiny(), "prompt": torch.randint(2, V, (1, 3)), "settings": {"n": 8, "new": 3}}


@torch.no_grad()
def right(model, prompt, settings):
    n = settings["n"]
    ids, out = prompt.expand(n, -1), []
    code = (torch.rand((), dtype=torch.double) + torch.arange(n, dtype=torch.double) / n) % 1.0
    for _ in range(settings["new"]):
        p = model(ids)[:, -1].double().softmax(-1)
        hi = p.cumsum(-1)
        tok = (code[:, None] >= hi).sum(-1, keepdim=True).clamp(max=V - 1)
        pt = p.gather(1, tok)
        code = ((code[:, None] - (hi.gather(1, tok) - pt)) / pt)[:, 0].clamp(0, 1 - 1e-12)
        ids = torch.cat([ids, tok], 1); out.append(pt[:, 0].log())
    return ids, torch.stack(out, 1).float()


if __name__ == "__main__":
    b = make(0); ids, lps = right(**b)
    ref = b["model"](ids)[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:, None])[..., 0]
    assert torch.allclose(ref, lps, atol=1e-4)
    big, _ = right(b["model"], b["prompt"], {"n": 4000, "new": 2})
    p = b["model"](b["prompt"])[0, -1].softmax(-1)
    gap = (torch.bincount(big[:, 3], minlength=V) / 4000 - p).abs().max().item()
    x = int(p.argmax()); sub = big[big[:, 3] == x][:, 4]
    p2 = b["model"](torch.cat([b["prompt"], torch.tensor([[x]])], 1))[0, -1].softmax(-1)
    gap2 = (torch.bincount(sub, minlength=V) / len(sub) - p2).abs().max().item()
    assert gap < 1e-3 and gap2 < 2e-2
    print("stratified gap", gap, "second token", gap2)
