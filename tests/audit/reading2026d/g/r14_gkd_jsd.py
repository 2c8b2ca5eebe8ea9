"""Generalised Jensen-Shannon distillation (GKD, Agarwal et al. 2023, TRL). F.kl_div is called with the MIXTURE as its first argument, so the direction reads reversed; the mixture keeps the student's gradient."""
FAMILY = "distillation"
KIND = "loss"
INPUTS = {"ids": "[rows, time], may be sampled by the student", "loss_mask": "1 on trained tokens", "teacher_logits": "[rows, time, V]"}
SETTINGS = {"beta": "weight of the teacher in the mixture, 0.3, strictly between 0 and 1", "temperature": "0.9 for both models; the loss is not multiplied by its square"}
NOTES = "Distillation; sum over the vocabulary, mean over trained tokens of all rows. teacher_logits constant."
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
    return {"model": model, "ids": ids, "loss_mask": mask, "teacher_logits": 2 * torch.randn(6, 10, V)}


def right(model, batch, beta=0.3, temperature=0.9):
    s = (model(batch["ids"])[:, :-1] / temperature).log_softmax(-1)
    t = (batch["teacher_logits"][:, :-1] / temperature).log_softmax(-1)
    mix = torch.logsumexp(torch.stack([s + math.log(1 - beta), t + math.log(beta)]), 0)
    kl_t = F.kl_div(mix, t, reduction="none", log_target=True).sum(-1)
    kl_s = F.kl_div(mix, s, reduction="none", log_target=True).sum(-1)
    m = batch["loss_mask"][:, 1:]
    return ((beta * kl_t + (1 - beta) * kl_s) * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss); tot = 0.0; m = b["loss_mask"][:, 1:]
    out = model(b["ids"])
    for i, t in m.nonzero().tolist():
        p = (b["teacher_logits"][i, t] / .9).softmax(0); q = (out[i, t] / .9).softmax(0); x = .3 * p + .7 * q
        tot = tot + .3 * (p * (p / x).log()).sum() + .7 * (q * (q / x).log()).sum()
    tot = tot / m.sum()
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
