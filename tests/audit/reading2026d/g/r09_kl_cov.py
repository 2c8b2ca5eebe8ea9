"""KL-Cov (Cui et al. 2025, entropy mechanism). A few tokens with the largest covariance of log-prob and advantage, chosen over the whole batch, get a penalty |lp - old|; all others are an UNCLIPPED ratio loss. Right: these tokens drive the entropy collapse."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 is padding", "loss_mask": "1 where the token is trained, [rows, time]",
          "old_logps": "log-probs of the old policy, [rows, time-1]", "advantages": "advantage of each token, [rows, time-1]"}
SETTINGS = {"k_ratio": "share of trained tokens that are penalised, 0.1 (2e-3 in the paper)", "coef": "penalty coefficient, 1.0"}
NOTES = ("Policy gradient; mean over the trained tokens of all rows; the selection is over the whole batch, so splitting the batch changes the loss. "
         "The selection carries no gradient; old_logps, advantages constants. All parameters used.")
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


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), shape [rows, time-1]."""
    lp = F.log_softmax(model(ids)[:, :-1].float(), dim=-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


def make(seed):
    model, ids, mask = base_rows(seed)
    sh = (ids.shape[0], ids.shape[1] - 1)
    old = token_logps(model, ids).detach() + 0.2 * torch.randn(sh)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(sh)}


def right(model, batch, k_ratio=0.1, coef=1.0):
    keep = batch["loss_mask"][:, 1:].bool()
    lp = token_logps(model, batch["ids"])[keep]
    old, a = batch["old_logps"][keep], batch["advantages"][keep]
    loss = -a * (lp - old).exp()
    with torch.no_grad():
        cov = (lp - lp.mean()) * (a - a.mean())
        k = max(1, int(cov.numel() * k_ratio))
        top = cov.topk(k).indices
    penalty = torch.zeros_like(loss).index_put((top,), (lp - old).abs()[top])
    return (loss + coef * penalty).mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b)
    lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    idx = m.nonzero().tolist()
    ml = sum(lp[i, t].item() for i, t in idx) / len(idx); ma = sum(b["advantages"][i, t].item() for i, t in idx) / len(idx)
    cov = sorted(((lp[i, t].item() - ml) * (b["advantages"][i, t].item() - ma), i, t) for i, t in idx)
    chosen = {(i, t) for _, i, t in cov[-max(1, int(len(idx) * 0.1)):]}
    tot = 0.0
    for i, t in idx:
        d = lp[i, t] - b["old_logps"][i, t]
        tot = tot - b["advantages"][i, t] * d.exp() + (d.abs() if (i, t) in chosen else 0)
    tot = tot / len(idx)
    g = flat_grad(model, loss)
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "penalised", len(chosen), "of", len(idx), "grad", g.norm().item())
