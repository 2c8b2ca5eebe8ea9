"""Dual-clip PPO: for negative advantages the surrogate is bounded a second time at c * advantage (c = 3), so a token with a negative advantage and
ratio > c gets NO gradient, although ordinary PPO would push it hardest. Ye et al. 2020 ('Mastering complex control in MOBA games'); verl's clip_ratio_c = 3.
Rows are left padded with prompts and completions in fixed windows, as generation engines return them."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"prompt_ids": "prompt token ids, [rows, 4], LEFT padded with 0",
          "response_ids": "sampled token ids, [rows, 8], RIGHT padded with 0",
          "attention_mask": "1 on real tokens of prompt and response, [rows, 12]; there are zeros on both ends",
          "old_logps": "log-probabilities of response_ids under the sampling policy, [rows, 8], constant",
          "advantages": "token-level advantages, [rows, 8], constant"}
SETTINGS = {"clip_low": "lower clip, 0.2", "clip_high": "upper clip, 0.28 (clip-higher of DAPO)", "clip_c": "dual clip bound for negative advantages, 3.0"}
NOTES = ("Policy-gradient, PPO-clip family with dual clip. Reduction: mean over real response tokens of all rows. The last 8 columns of attention_mask are the loss mask. "
         "Position ids are cumulative sums of attention_mask, so left padding does not shift positions. old_logps and advantages are constants. "
         "All parameters are used (position embeddings beyond the longest row have no gradient). Any number of rows.")

class TinyLM(nn.Module):
    """One causal attention block. allowed: [rows, time, time] bool, who may look at whom (besides causality)."""
    def __init__(self, vocab=32, width=16, max_time=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_time, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, allowed, position_ids):
        x = self.emb(ids) + self.pos(position_ids)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        score = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        score = score.masked_fill(~(causal & allowed), -1e9)
        return self.head(torch.tanh(x + score.softmax(-1) @ self.v(x)))

def _response_logps(model, batch):
    ids = torch.cat([batch["prompt_ids"], batch["response_ids"]], 1)
    att = batch["attention_mask"].bool()
    pos = (att.long().cumsum(1) - 1).clamp(min=0)
    logits = model(ids, att.unsqueeze(1).expand(-1, ids.shape[1], -1), pos)
    n = batch["response_ids"].shape[1]
    return logits[:, -n - 1:-1].log_softmax(-1).gather(-1, batch["response_ids"].unsqueeze(-1)).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, P, R = 6, 4, 8
    prompt, resp, att = torch.zeros(rows, P, dtype=torch.long), torch.zeros(rows, R, dtype=torch.long), torch.zeros(rows, P + R, dtype=torch.long)
    for i in range(rows):
        p, r = int(torch.randint(1, P + 1, (1,), generator=g)), int(torch.randint(3, R + 1, (1,), generator=g))
        prompt[i, P - p:] = torch.randint(1, 32, (p,), generator=g)
        resp[i, :r] = torch.randint(1, 32, (r,), generator=g)
        att[i, P - p:P + r] = 1
    batch = {"prompt_ids": prompt, "response_ids": resp, "attention_mask": att}
    model = TinyLM(max_time=P + R)
    with torch.no_grad():
        batch["old_logps"] = (_response_logps(model, batch) + 1.2 * torch.randn(rows, R, generator=g)).clamp(max=-0.01)
    batch["advantages"] = torch.randn(rows, R, generator=g)
    return {"model": model, **batch}


def right(model, batch, clip_low=0.2, clip_high=0.28, clip_c=3.0):
    mask = batch["attention_mask"][:, -batch["response_ids"].shape[1]:].float()
    adv = batch["advantages"]
    ratio = torch.exp(_response_logps(model, batch) - batch["old_logps"])
    pg = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip_low, 1 + clip_high))
    pg = torch.where(adv < 0, torch.min(pg, -adv * clip_c), pg)
    return (pg * mask).sum() / mask.sum(), {"dual_clipped": (((adv < 0) & (ratio > clip_c)) * mask).sum().item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    total, n = 0.0, 0
    for i in range(6):                                     # without any padding, token by token, in cases
        ids = torch.cat([d["prompt_ids"][i], d["response_ids"][i]])[d["attention_mask"][i].bool()]
        p, T = int(d["attention_mask"][i, :4].sum()), len(ids)
        logits = model(ids[None], torch.ones(1, T, T, dtype=torch.bool), torch.arange(T)[None])[0]
        for j in range(p, T):
            r = torch.exp(logits[j - 1].log_softmax(-1)[ids[j]] - d["old_logps"][i, j - p])
            a, n = float(d["advantages"][i, j - p]), n + 1
            if a >= 0:
                term = -a * (r if r < 1.28 else 1.28)
            else:
                term = -a * (0.8 if r < 0.8 else (r if r < 3.0 else 3.0))
            total = total + term
    g1, g2 = grads(loss, model), grads(total / n, model)
    print("loss", loss.item(), "explicit", (total / n).item(), metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - (total / n).item()) < 1e-5 and close(g1, g2) and metrics["dual_clipped"] > 0
