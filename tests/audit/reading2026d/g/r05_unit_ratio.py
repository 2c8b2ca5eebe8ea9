"""On-policy GRPO with the ratio exp(lp - lp.detach()) (TRL with one step per generation). The ratio is always 1 and the loss value is always zero for centred advantages, yet the gradient is that of REINFORCE."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], 0 is padding; rows of one group are adjacent", "loss_mask": "1 where the token is trained, [rows, time]",
          "rewards": "one reward per row, [rows]"}
SETTINGS = {"group": "rows per prompt, 3; must divide the number of rows"}
NOTES = ("Policy gradient, strictly on policy; mean over trained tokens of a row, then mean over rows. The value of the loss is 0 up to rounding: never use it as a metric. "
         "rewards are constants. No division by the standard deviation. The number of rows must be a multiple of group.")
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
    return {"model": model, "ids": ids, "loss_mask": mask, "rewards": torch.randn(ids.shape[0])}


def right(model, batch, group=3):
    r = batch["rewards"].view(-1, group)
    adv = (r - r.mean(1, keepdim=True)).view(-1, 1)
    lp = token_logps(model, batch["ids"])
    m = batch["loss_mask"][:, 1:]
    per_token = -torch.exp(lp - lp.detach()) * adv
    return ((per_token * m).sum(1) / m.sum(1)).mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b)
    lp = token_logps(model, b["ids"]); m = b["loss_mask"][:, 1:]
    tot = 0.0
    for i in range(6):
        k = i // 3 * 3
        a = b["rewards"][i] - b["rewards"][k:k + 3].mean()
        tot = tot - a * (lp[i] * m[i]).sum() / m[i].sum() / 6
    g, h = flat_grad(model, loss), flat_grad(model, tot)
    assert abs(loss.item()) < 1e-6 and torch.allclose(g, h, atol=1e-6) and g.norm() > 1e-3
    print("loss value", loss.item(), "grad norm", g.norm().item())
