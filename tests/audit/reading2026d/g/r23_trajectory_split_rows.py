"""Agent whose context was compacted: one trajectory is trained as SEVERAL rows. The mean is taken over the trained tokens of all rows of a trajectory, then over trajectories, so a trajectory that was cut into many rows does not weigh more."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "1 on tokens the model wrote in this row; text repeated as context is 0", "traj": "trajectory of each row, [rows], not sorted", "advantages": "advantage of each TRAJECTORY, [trajectories]"}
SETTINGS = {}
NOTES = "On-policy policy gradient; mean over a trajectory's trained tokens, mean over trajectories (not rows). All rows of a trajectory must be in the same batch; any number of rows. advantages constant."
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
    return {"model": model, "ids": ids, "loss_mask": mask, "traj": torch.tensor([2, 0, 1, 0, 0, 2]), "advantages": torch.tensor([0.7, -1.1, 0.4])}


def right(model, batch):
    lp = token_logps(model, batch["ids"]); m = batch["loss_mask"][:, 1:]
    n = batch["advantages"].shape[0]
    s = torch.zeros(n).index_add(0, batch["traj"], (lp * m).sum(1))
    c = torch.zeros(n).index_add(0, batch["traj"], m.sum(1))
    return -(batch["advantages"] * s / c.clamp(min=1)).mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss); lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:] == 1
    tot = 0.0
    for k in range(3):
        toks = torch.cat([lp[i][m[i]] for i in range(6) if b["traj"][i] == k])
        tot = tot - b["advantages"][k] * toks.mean() / 3
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
