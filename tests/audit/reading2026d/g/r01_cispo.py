"""CISPO (MiniMax-M1). The importance ratio is clipped from above, DETACHED and multiplied with log-prob; no min(), so tokens beyond the clip keep a gradient. Right: it is a REINFORCE estimator with a truncated importance weight."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 is padding", "loss_mask": "1 where the token is trained, [rows, time]",
          "old_logps": "log-probs of the sampling policy for ids[:, 1:], [rows, time-1]", "advantages": "one advantage per row, [rows]"}
SETTINGS = {"clip_high": "upper truncation of the importance weight, 1 + clip_high, clip_high = 0.28"}
NOTES = ("Policy gradient; mean over the trained tokens of all rows. old_logps and advantages are constants, the weight is a constant by design. "
         "All parameters used, any number of rows. The value of the loss is not the PPO objective, only the gradient matters.")
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
    old = token_logps(model, ids).detach() + 0.4 * torch.randn(ids.shape[0], ids.shape[1] - 1)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(ids.shape[0])}


def right(model, batch, clip_high=0.28):
    lp = token_logps(model, batch["ids"])
    m = batch["loss_mask"][:, 1:]
    weight = torch.exp(lp - batch["old_logps"]).clamp(max=1.0 + clip_high).detach()
    per_token = -weight * batch["advantages"][:, None] * lp
    return (per_token * m).sum() / m.sum().clamp(min=1)


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b)
    tot, n = 0.0, 0
    lp = token_logps(model, b["ids"])
    for i in range(lp.shape[0]):
        for t in range(lp.shape[1]):
            if b["loss_mask"][i, t + 1] == 1:
                w = min(math.exp(lp[i, t].item() - b["old_logps"][i, t].item()), 1.28)
                tot = tot - w * b["advantages"][i].item() * lp[i, t]; n += 1
    g, h = flat_grad(model, loss), flat_grad(model, tot / n)
    assert torch.allclose(loss, tot / n, atol=1e-5) and torch.allclose(g, h, atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
