"""Speculative sampling (Leviathan et al. 2022). Tokens come from a DRAFT model; a refused token is drawn from the positive part of (target - draft), not from the target. Right: the result is exactly distributed as the target, and the target's log-probs are returned."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "target model", "prompt": "[1, time]", "settings": "holds the draft model"}
SETTINGS = {"draft": "small model", "gamma": "draft tokens per round, 2"}
NOTES = "One row, one round: returns 1 to gamma + 1 new tokens. Log-probs are the target's (they are the behaviour policy), never the draft's."
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
    return {"model": Tiny(), "prompt": torch.randint(2, V, (1, 3)), "settings": {"draft": Tiny(), "gamma": 2}}


@torch.no_grad()
def right(model, prompt, settings):
    ids, q = prompt, []
    for _ in range(settings["gamma"]):
        q.append(settings["draft"](ids)[0, -1].softmax(-1))
        ids = torch.cat([ids, torch.multinomial(q[-1], 1)[None]], 1)
    p = model(ids)[0, prompt.shape[1] - 1:].softmax(-1)
    new = ids[0, prompt.shape[1]:].tolist()
    for i, x in enumerate(new):
        if torch.rand(()) * q[i][x] > p[i][x]:
            new = new[:i] + [torch.multinomial((p[i] - q[i]).clamp(min=0), 1).item()]
            break
    else:
        new = new + [torch.multinomial(p[-1], 1).item()]
    lps = torch.stack([p[i][x].log() for i, x in enumerate(new)])
    return torch.cat([prompt, torch.tensor([new])], 1), lps[None]


if __name__ == "__main__":
    b = make(0); ids, lps = right(**b)
    ref = b["model"](ids)[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:, None])[..., 0]
    assert torch.allclose(ref, lps, atol=1e-5)
    # exact: accepted mass + refused mass * residual = target
    p = b["model"](b["prompt"])[0, -1].softmax(-1); q = b["settings"]["draft"](b["prompt"])[0, -1].softmax(-1)
    acc = torch.minimum(p, q); res = (p - q).clamp(min=0)
    assert torch.allclose(acc + (1 - acc.sum()) * res / res.sum(), p, atol=1e-6)
    n, c = 400, torch.zeros(V)
    for _ in range(n):
        c[right(b["model"], b["prompt"], {"draft": b["settings"]["draft"], "gamma": 1})[0][0, 3]] += 1
    gap = (c / n - p).abs().max().item()
    assert gap < 0.07
    print("new tokens", ids[0, 3:].tolist(), "largest gap", gap)
