"""CISPO on packed rows: the importance weight is clipped from above only AND detached, and multiplies advantage * logp, so
tokens beyond the clip keep a gradient (unlike PPO) and the loss is a weighted log-likelihood, not a ratio. MiniMax-M1 (2025);
TRL loss_type="cispo". Several samples share a row; attention is block-diagonal and positions restart per sample."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], several samples packed one after another, right padded with 0",
          "segment": "number of the sample within its row from 1, 0 = padding, [rows, time]",
          "position_ids": "position within the sample, restarts at 0 with each sample, [rows, time]",
          "loss_mask": "1 on sampled tokens, 0 on prompts (the first token of a sample is always prompt) and padding, [rows, time]",
          "old_logps": "log-probability of each token under the sampling policy, 0 where loss_mask is 0, [rows, time], constant",
          "token_advantages": "advantage of the sample copied to each of its tokens, [rows, time], constant"}
SETTINGS = {"max_weight": "upper bound of the detached importance weight, 5.0; no lower bound"}
NOTES = ("Policy-gradient with clipped, detached importance weight (CISPO); no min, no lower clip. Reduction: sum over trained tokens of the "
         "whole batch divided by their number; so packing does not change the value. old_logps and token_advantages are constants. "
         "All parameters are used except position embeddings beyond the longest sample. Any number of rows.")

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

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, time = 3, 16
    z = lambda: torch.zeros(rows, time, dtype=torch.long)
    ids, seg, pos, mask, adv = z(), z(), z(), torch.zeros(rows, time), torch.zeros(rows, time)
    for r in range(rows):
        at, s = 0, 0
        while at + 5 <= time:
            n = min(int(torch.randint(5, 8, (1,), generator=g)), time - at)
            s += 1
            ids[r, at:at + n] = torch.randint(1, 32, (n,), generator=g)
            seg[r, at:at + n], pos[r, at:at + n] = s, torch.arange(n)
            mask[r, at + 2:at + n] = 1.0
            adv[r, at:at + n] = torch.randn(1, generator=g)
            at += n
    model = TinyLM(max_time=7)
    batch = {"ids": ids, "segment": seg, "position_ids": pos, "loss_mask": mask}
    with torch.no_grad():
        old = (_logps(model, batch) + 1.5 * torch.randn(rows, time, generator=g)).clamp(max=-0.01) * mask
    return {"model": model, **batch, "old_logps": old, "token_advantages": adv}


def _logps(model, batch):
    """Aligned with ids: entry t is the log-probability of ids[:, t]; entry 0 is a dummy 0."""
    seg = batch["segment"]
    logits = model(batch["ids"], seg.unsqueeze(2) == seg.unsqueeze(1), batch["position_ids"])
    logp = logits[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
    return nn.functional.pad(logp, (1, 0))


def right(model, batch, max_weight=5.0):
    logp, mask = _logps(model, batch), batch["loss_mask"]
    weight = torch.exp(logp - batch["old_logps"]).clamp(max=max_weight).detach()
    loss = -(weight * batch["token_advantages"] * logp * mask).sum() / mask.sum()
    return loss, {"at_bound": ((weight >= max_weight) * mask).sum().item() / mask.sum().item()}


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
    for r in range(3):                                         # each sample alone, unpacked, token by token
        for s in range(1, int(d["segment"][r].max()) + 1):
            at = (d["segment"][r] == s).nonzero().flatten()
            ids = d["ids"][r, at][None]
            T = len(at)
            logits = model(ids, torch.ones(1, T, T, dtype=torch.bool), torch.arange(T)[None])[0]
            for j in range(1, T):
                if d["loss_mask"][r, at[j]] == 1:
                    lp = logits[j - 1].log_softmax(-1)[ids[0, j]]
                    w = min(5.0, float(torch.exp(lp.detach() - d["old_logps"][r, at[j]])))
                    total, n = total - w * float(d["token_advantages"][r, at[j]]) * lp, n + 1
    g1, g2 = grads(loss, model), grads(total / n, model)
    print("loss", loss.item(), "explicit", (total / n).item(), metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - (total / n).item()) < 1e-5 and close(g1, g2) and metrics["at_bound"] > 0
