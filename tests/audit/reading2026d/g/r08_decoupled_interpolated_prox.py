"""Decoupled PPO with an approximated proximal policy (Hilton et al. 2022; A-3PO). The clip centre is a mixture in log space of the behaviour policy and the PRESENT policy (detached), so the 'old' log-probs move with the model; the behaviour weight prox/behaviour corrects for it."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 is padding", "loss_mask": "1 where the token is trained, [rows, time]",
          "behav_logps": "log-probs of the policy that sampled, [rows, time-1]", "lag": "versions between sampling and now, int, [rows], 0 is fresh",
          "advantages": "one per row, [rows]"}
SETTINGS = {"clip": "PPO clip around the proximal policy, 0.2"}
NOTES = ("Asynchronous PPO; mean over the trained tokens of all rows. Rows with lag 0 or 1 use the behaviour policy itself as centre (alpha 1), lag d uses alpha = 1/d. "
         "prox is detached; behav_logps, lag, advantages constants. All parameters used.")
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
    old = token_logps(model, ids).detach() + 0.3 * torch.randn(ids.shape[0], ids.shape[1] - 1)
    return {"model": model, "ids": ids, "loss_mask": mask, "behav_logps": old, "lag": torch.tensor([0, 1, 2, 3, 4, 2]), "advantages": torch.randn(ids.shape[0])}


def right(model, batch, clip=0.2):
    lp = token_logps(model, batch["ids"])
    m = batch["loss_mask"][:, 1:]
    a = batch["advantages"][:, None]
    alpha = (1.0 / batch["lag"].clamp(min=1).float())[:, None]
    prox = alpha * batch["behav_logps"] + (1 - alpha) * lp.detach()
    r = (lp - prox).exp()
    w = (prox - batch["behav_logps"]).exp()
    per_token = -w * torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)
    return (per_token * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b)
    lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    tot = 0.0
    for i, t in m.nonzero().tolist():
        al = 1.0 / max(1, b["lag"][i].item())
        be = b["behav_logps"][i, t].item()
        px = al * be + (1 - al) * lp[i, t].item()
        a, r = b["advantages"][i], (lp[i, t] - px).exp()
        tot = tot - math.exp(px - be) * min(r * a, r.clamp(0.8, 1.2) * a) / m.sum()
    g = flat_grad(model, loss)
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    # where nothing is clipped, w * r is exactly pi / behaviour
    print("loss", loss.item(), "grad", g.norm().item())
