"""Listwise reward model (Plackett-Luce, as in InstructGPT-like rankings of K answers). The loss of place j compares with all worse ones by
a log-sum-exp from the END of the list; the last place is always exactly zero. Lists are ragged and prompts weigh the same."""
FAMILY = "reward model"
KIND = "loss"
INPUTS = {"ids": "answers of a prompt, best first, padding 0, [prompts, answers, time]",
          "last": "index of the last real token of each answer, [prompts, answers]",
          "valid": "1 where the answer exists, missing ones are at the end, [prompts, answers]"}
SETTINGS = {}
NOTES = ("Reduction: per prompt the mean over its answers but the last, then mean over prompts with two or more answers. Listwise preference; the score head "
         "has no bias as the loss cannot see it. Order along the second axis carries the label. All parameters are used.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class Reward(nn.Module):
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, ids, last):
        h = self.rnn(self.emb(ids))[0]
        return self.score(h[torch.arange(len(ids)), last]).squeeze(-1)


def make(seed):
    torch.manual_seed(seed)
    p, k, t = 4, 5, 9
    ids = torch.randint(1, 24, (p, k, t))
    last = torch.randint(3, t, (p, k))
    ids = ids * (torch.arange(t) <= last[..., None])
    valid = (torch.arange(k) < torch.tensor([5, 3, 2, 4])[:, None]).float()
    return {"ids": ids, "last": last, "valid": valid, "model": Reward()}


def right(model, batch):
    p, k, t = batch["ids"].shape
    s = model(batch["ids"].reshape(p * k, t), batch["last"].reshape(-1)).reshape(p, k)
    s_masked = s.masked_fill(batch["valid"] == 0, -1e9)
    rest = s_masked.flip(1).logcumsumexp(1).flip(1)
    nll = (rest - s) * batch["valid"]
    places = batch["valid"].sum(1) - 1.0
    per_prompt = nll.sum(1) / places.clamp(min=1.0)
    ranked = (places > 0).float()
    return (per_prompt * ranked).sum() / ranked.sum().clamp(min=1.0)


def check(loss, model, want, tol=1e-4):
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads.items():
        assert g is not None and float(g.abs().sum()) > 0, n
    norm = sum(float(g.pow(2).sum()) for g in grads.values()) ** 0.5
    print("loss %.6f  slow loop %.6f  grad norm %.5f" % (loss.item(), float(want), norm))
    assert abs(loss.item() - float(want)) < tol


if __name__ == "__main__":
    import math
    d = make(0)
    m = d.pop("model")
    tot = 0.0
    for i in range(4):
        n = int(d["valid"][i].sum())
        s = m(d["ids"][i], d["last"][i])[:n].tolist()
        tot += sum(math.log(sum(math.exp(x) for x in s[j:])) - s[j] for j in range(n - 1)) / (n - 1)
    check(right(m, d), m, tot / 4)
