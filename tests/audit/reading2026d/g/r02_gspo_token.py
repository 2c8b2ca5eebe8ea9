"""GSPO-token (Qwen, Zheng et al. 2025). The ratio is sg[sequence ratio] * exp(lp - sg[lp]): the second factor is always 1 in value and only carries the gradient. Right: with one advantage per row its gradient is that of the sequence-level GSPO loss."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 is padding", "loss_mask": "1 where the token is trained, [rows, time]",
          "old_logps": "log-probs of the old policy for ids[:, 1:], [rows, time-1]", "advantages": "advantage of each token, [rows, time-1]; here constant over a row"}
SETTINGS = {"eps_low": "lower clip, 3e-4 in the paper, here 0.05", "eps_high": "upper clip, here 0.08"}
NOTES = ("Policy gradient; mean over trained tokens inside each row, then mean over rows. The sequence ratio is length-normalised (geometric mean). "
         "old_logps and advantages constants; all parameters used. Rows must have at least one trained token.")
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
    old = token_logps(model, ids).detach() + 0.1 * torch.randn(ids.shape[0], ids.shape[1] - 1)
    adv = torch.randn(ids.shape[0], 1).expand(-1, ids.shape[1] - 1).contiguous()
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": adv}


def right(model, batch, eps_low=0.05, eps_high=0.08):
    lp = token_logps(model, batch["ids"])
    m = batch["loss_mask"][:, 1:]
    n = m.sum(1).clamp(min=1)
    seq = (((lp - batch["old_logps"]) * m).sum(1) / n).detach()
    log_ratio = seq[:, None] + lp - lp.detach()
    ratio = log_ratio.exp()
    a = batch["advantages"]
    obj = torch.minimum(ratio * a, ratio.clamp(1 - eps_low, 1 + eps_high) * a)
    return -((obj * m).sum(1) / n).mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b)
    lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    tot = 0.0
    for i in range(lp.shape[0]):
        s = (((lp[i] - b["old_logps"][i]) * m[i]).sum() / m[i].sum()).exp()
        a = b["advantages"][i, 0]
        tot = tot - torch.minimum(s * a, s.clamp(0.95, 1.08) * a) / lp.shape[0]
    g, h = flat_grad(model, loss), flat_grad(model, tot)
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, h, atol=1e-6) and g.norm() > 0
    print("loss", loss.item(), "grad equals sequence-level GSPO:", (g - h).abs().max().item())
