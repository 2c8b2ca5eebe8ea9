"""TOPR, tapered off-policy REINFORCE (Le Roux et al. 2025). Positive rows get NO importance ratio although they are off-policy; negative rows get the sequence ratio truncated to [0, 1]. Right: asymmetric on purpose, it keeps positives a plain likelihood loss and stops negatives once they are unlikely."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 is padding", "loss_mask": "1 where the token is trained, [rows, time]",
          "old_logps": "log-probs of the sampling policy for ids[:, 1:], [rows, time-1]", "reward": "+1 or -1 of each row, [rows]"}
SETTINGS = {}
NOTES = ("Off-policy REINFORCE; SUM over the trained tokens of a row (sequence log-prob, no length normalisation), mean over rows. "
         "No baseline by intent. Weights are detached; old_logps and reward constants. All parameters used.")
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
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "reward": torch.tensor([1., -1., 1., -1., -1., 1.])}


def right(model, batch):
    m = batch["loss_mask"][:, 1:]
    seq = (token_logps(model, batch["ids"]) * m).sum(1)
    seq_old = (batch["old_logps"] * m).sum(1)
    tapered = (seq - seq_old).detach().clamp(max=0.0).exp()
    weight = torch.where(batch["reward"] > 0, torch.ones_like(tapered), tapered)
    return -(weight * batch["reward"] * seq).mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b)
    lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    tot = 0.0
    for i in range(6):
        s = (lp[i] * m[i]).sum(); so = (b["old_logps"][i] * m[i]).sum()
        if b["reward"][i] > 0:
            tot = tot - s
        else:
            tot = tot + min(1.0, math.exp(s.item() - so.item())) * s
    g, h = flat_grad(model, loss), flat_grad(model, tot / 6)
    assert torch.allclose(loss, tot / 6, atol=1e-4) and torch.allclose(g, h, atol=1e-4) and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
