"""KTO: unpaired good and bad completions, and a baseline from wrongly paired prompts and completions (arXiv 2402.01306; TRL KTOTrainer).
The reference point is an estimate of the divergence from completions that belong to another prompt of the batch, without gradient and not below zero. A row
alone has a loss (no pair). The sign turns for bad rows. Log-probabilities are sums, not means over tokens. Good and bad rows have different weights."""
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and completion, [rows, time]", "kl_ids": "the same prompts with the completion of another row, [rows, time]", "mask": "1 on completion tokens of ids, [rows, time]", "kl_mask": "the same for kl_ids, [rows, time]",
          "ref_logps": "sum of the reference log-probabilities of the completion of each row, [rows]", "ref_kl_logps": "the same for kl_ids, [rows]", "desirable": "1 good, 0 bad, [rows]"}
SETTINGS = {"beta": "0.1", "good_weight": "weight of good rows, 1.0", "bad_weight": "weight of bad rows, 1.33"}
NOTES = ("Preference loss on unpaired rows. weight * (1 - sigmoid(beta * s * (logratio - z))), s = 1 good, -1 bad; z = max(0, mean log ratio of kl_ids), detached. Mean over all rows (weights are not in the divisor). "
         "Reference values are constants. z depends on all rows of the batch. Every parameter is used.")
import math
import torch
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    """One causal attention layer: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=40, width=16, length=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allow=None):
        t = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.pos(t if positions is None else positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        allow = (t[:, None] >= t[None]) if allow is None else allow
        return self.head(x + score.masked_fill(~allow, float("-inf")).softmax(-1) @ v)


def logps(model, ids, mask):
    lp = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return (lp * mask[:, 1:]).sum(1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(0, 40, (5, 11), generator=g)
    mask = ((torch.arange(11) >= 4) & (torch.arange(11) < torch.randint(6, 12, (5, 1), generator=g))).float()
    kl_ids, kl_mask = ids.clone(), mask.roll(1, 0)
    kl_ids[:, 4:] = ids[:, 4:].roll(1, 0)
    with torch.no_grad():
        ref, ref_kl = logps(model, ids, mask) - torch.randn(5, generator=g), logps(model, kl_ids, kl_mask) - 0.5 - 0.3 * torch.rand(5, generator=g)
    return {"model": model, "ids": ids, "kl_ids": kl_ids, "mask": mask, "kl_mask": kl_mask, "ref_logps": ref, "ref_kl_logps": ref_kl, "desirable": torch.tensor([1., 0, 1, 1, 0])}


def right(model, batch, beta=0.1, good_weight=1.0, bad_weight=1.33):
    ratio = logps(model, batch["ids"], batch["mask"]) - batch["ref_logps"]
    with torch.no_grad():
        z = (logps(model, batch["kl_ids"], batch["kl_mask"]) - batch["ref_kl_logps"]).mean().clamp(min=0)
    good = batch["desirable"].bool()
    loss_good = good_weight * (1 - torch.sigmoid(beta * (ratio[good] - z)))
    loss_bad = bad_weight * (1 - torch.sigmoid(beta * (z - ratio[~good])))
    return torch.cat([loss_good, loss_bad]).mean(), {"kl": z.item()}


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss, metrics = right(m, d)
    loss.backward()
    with torch.no_grad():
        lp, lk = m(d["ids"]).log_softmax(-1), m(d["kl_ids"]).log_softmax(-1)
    s = lambda q, ids, mask, i: sum(q[i, t - 1, ids[i, t]].item() for t in range(1, 11) if mask[i, t])
    z = max(0.0, sum(s(lk, d["kl_ids"], d["kl_mask"], i) - d["ref_kl_logps"][i].item() for i in range(5)) / 5)
    tot = 0
    for i in range(5):
        r = s(lp, d["ids"], d["mask"], i) - d["ref_logps"][i].item()
        sign, w = (1, 1.0) if d["desirable"][i] else (-1, 1.33)
        tot += w * (1 - 1 / (1 + math.exp(-0.1 * sign * (r - z)))) / 5
    print(loss.item(), tot, metrics, m.head.weight.grad.norm().item())
    assert abs(loss.item() - tot) < 1e-5 and metrics["kl"] > 0
