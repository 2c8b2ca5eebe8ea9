"""IPO (Azar et al. 2023) with AVERAGE log-probs per token, as in TRL. A squared error to 1/(2 beta) instead of a log-sigmoid, so the loss also pushes back when the margin is too large; lengths are divided out although DPO sums."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "first half chosen, second half rejected rows, [2*pairs, time]", "loss_mask": "1 on completion tokens", "ref_avg_logps": "mean reference log-prob of each row, [2*pairs]"}
SETTINGS = {"beta": "0.5; the target margin is 1/(2 beta) = 1"}
NOTES = "Preference loss; mean over pairs; mean over tokens inside a row. Needs an even number of rows: chosen first, then rejected in the same order. Reference constant."
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
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_avg_logps": -3 + 0.2 * torch.randn(6)}


def right(model, batch, beta=0.5):
    m = batch["loss_mask"][:, 1:]
    avg = (token_logps(model, batch["ids"]) * m).sum(1) / m.sum(1)
    c, r = (avg - batch["ref_avg_logps"]).chunk(2)
    return (c - r - 1 / (2 * beta)).square().mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    tot = 0.0
    for i in range(3):
        f = lambda k: lp[k][m[k] == 1].mean() - b["ref_avg_logps"][k]
        tot = tot + (f(i) - f(i + 3) - 1.0) ** 2 / 3
    g = flat_grad(model, loss)
    assert torch.allclose(loss, tot, atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
