"""Trajectory balance with a batch estimate of log Z (VarGrad; TBA, Bartoldson et al. 2025). Off-policy rows without any ratio: the squared gap of policy log-prob to reference + reward/beta, with the group mean as partition function, detached; the gradient is the same as without the detach because the gaps sum to zero."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "[rows, time], rows of a group adjacent", "loss_mask": "1 on sampled tokens", "ref_logps": "summed reference log-prob of each row, [rows]", "rewards": "[rows]"}
SETTINGS = {"beta": "temperature of the reward, 0.5", "group": "rows per prompt, 3, must divide the rows"}
NOTES = "GFlowNet / regression loss; sum over tokens of a row, mean over rows. No importance ratio by intent. ref_logps, rewards, log Z constants."
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
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_logps": -12 + torch.randn(6), "rewards": torch.randn(6)}


def right(model, batch, beta=0.5, group=3):
    s = (token_logps(model, batch["ids"]) * batch["loss_mask"][:, 1:]).sum(1)
    gap = (batch["ref_logps"] + batch["rewards"] / beta - s).view(-1, group)
    log_z = gap.mean(1, keepdim=True).detach()
    return (log_z - gap).square().mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model"); loss = right(model, b); g = flat_grad(model, loss)
    s = (token_logps(model, b["ids"]) * b["loss_mask"][:, 1:]).sum(1); x = b["ref_logps"] + b["rewards"] / .5 - s
    tot = (x[:3].var(unbiased=False) + x[3:].var(unbiased=False)) / 2
    assert torch.allclose(loss, tot, atol=1e-4) and torch.allclose(g, flat_grad(model, tot), atol=1e-3) and g.norm() > 0
    print("loss", loss.item(), "group variance", tot.item(), "grad", g.norm().item())
