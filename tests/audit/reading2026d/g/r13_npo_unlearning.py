"""Negative preference optimisation for unlearning (Zhang et al. 2024). Forget rows LOWER their likelihood (a bounded ascent, -2/beta log sigmoid(-beta log ratio)) while retain rows are trained with cross-entropy in the same batch."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "1 on trained tokens", "forget": "True for rows to be forgotten, [rows]", "ref_logps": "summed log-probs of the starting model, [rows], used on forget rows only"}
SETTINGS = {"beta": "0.1", "retain": "weight of the retain term, 1.0"}
NOTES = "Unlearning; forget term: sum over tokens, mean over forget rows; retain term: mean over trained tokens of retain rows. Both kinds of rows must be present. ref_logps constant."
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
    with torch.no_grad():
        ref = (token_logps(model, ids) * mask[:, 1:]).sum(1) + 0.2 * torch.randn(6)
    return {"model": model, "ids": ids, "loss_mask": mask, "forget": torch.tensor([True, True, False, False, True, False]), "ref_logps": ref}


def right(model, batch, beta=0.1, retain=1.0):
    m = batch["loss_mask"][:, 1:]; lp = token_logps(model, batch["ids"]) * m
    f = batch["forget"]
    npo = -(2 / beta) * F.logsigmoid(-beta * (lp.sum(1) - batch["ref_logps"])[f]).mean()
    ce = -lp[~f].sum() / m[~f].sum()
    return npo + retain * ce, {"npo": npo.item(), "retain_ce": ce.item()}


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss, met = right(model, b); g = flat_grad(model, loss)
    lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    tot = sum((2 / .1) * torch.log1p(((lp[i] * m[i]).sum() - b["ref_logps"][i]).mul(.1).exp()) for i in (0, 1, 4)) / 3
    tot = tot - sum((lp[i] * m[i]).sum() for i in (2, 3, 5)) / m[[2, 3, 5]].sum()
    before = (lp * m).sum(1)[b["forget"]].mean().item()
    opt = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(5):
        opt.zero_grad(); right(model, b)[0].backward(); opt.step()
    after = (token_logps(model, b["ids"]) * m).sum(1)[b["forget"]].mean().item()
    assert torch.allclose(loss, tot, atol=1e-4) and after < before and g.norm() > 0
    print("loss", loss.item(), met, "forget log-prob", before, "->", after)
