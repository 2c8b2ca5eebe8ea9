"""Preference loss without a reference model, on average instead of summed log probabilities, with a margin that keeps pushing pairs that are ranked right.
Right: SimPO. beta is large (2.5) because the log probabilities are averages; the target margin gamma is subtracted inside the sigmoid."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"chosen": "token ids, [pairs, time]", "chosen_mask": "1 on answer tokens, [pairs, time]", "rejected": "token ids, [pairs, time]", "rejected_mask": "1 on answer tokens, [pairs, time]"}
SETTINGS = {"beta": "2.5", "gamma": "target margin, 1.4"}
NOTES = "Preference, reference-free: -log sigmoid(beta * (mean log p chosen - mean log p rejected) - gamma), mean over pairs."


class LM(nn.Module):
    def __init__(self, V=30, D=12):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, V)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def _avg(model, ids, mask):
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    m = mask[:, 1:]
    return (lp * m).sum(-1) / m.sum(-1)


def right(model, batch, beta=2.5, gamma=1.4):
    c, r = _avg(model, batch["chosen"], batch["chosen_mask"]), _avg(model, batch["rejected"], batch["rejected_mask"])
    return -F.logsigmoid(beta * (c - r) - gamma).mean(), {"accuracy": float((c > r).float().mean())}


def make(seed):
    torch.manual_seed(seed)
    start, prompt, pos = torch.randint(2, 4, (4, 1)), torch.randint(0, 30, (4, 11)), torch.arange(11)[None]
    def side():
        n = torch.randint(3, 8, (4, 1))
        ids = torch.where(pos < start, prompt, torch.randint(0, 30, (4, 11)))
        return ids, ((pos >= start) & (pos < start + n)).float()
    (a, b), (c, d) = side(), side()
    return {"model": LM(), "chosen": a, "chosen_mask": b, "rejected": c, "rejected_mask": d}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    loss, met = right(m, x)
    loss.backward()
    tot = 0.0
    for i in range(4):
        v = []
        for k in ("chosen", "rejected"):
            lp = m(x[k])[i].log_softmax(-1)
            on = [t for t in range(1, 11) if x[k + "_mask"][i, t]]
            v.append(sum(lp[t - 1, x[k][i, t]].item() for t in on) / len(on))
        tot += torch.log1p(torch.exp(torch.tensor(-(2.5 * (v[0] - v[1]) - 1.4)))).item() / 4
    print("loss", loss.item(), "explicit loop", tot, met, "gradient", m.out.weight.grad.norm().item())
    assert abs(loss.item() - tot) < 1e-5 and m.out.weight.grad.norm() > 0
