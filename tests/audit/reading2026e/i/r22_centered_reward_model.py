"""Reward model with margin and centring (Llama 2's margin; Eisenstein et al. 2023's (r_c + r_r)^2, TRL's center_rewards_coefficient). The
centring term punishes the SUM of two rewards, which a reader takes for a sign error of a difference."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "[pairs, time], right-padded with 0", "rejected_ids": "[pairs, time]", "margin": "how clearly the annotator preferred, >= 0, [pairs], constant"}
SETTINGS = {"center": "weight of the centring term, 0.01"}
NOTES = "Mean over pairs. The score is read at the last non-pad token. Bradley-Terry alone leaves the rewards' offset free: the second term fixes it (without it the output bias has zero gradient). All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Scorer(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, ids):
        per_token = self.out(self.rnn(self.emb(ids))[0]).squeeze(-1)
        last = (ids != 0).sum(1) - 1
        return per_token.gather(1, last[:, None]).squeeze(1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    def rows():
        ids = torch.randint(1, 31, (5, 9), generator=g); n = torch.randint(3, 10, (5,), generator=g)
        ids[torch.arange(9) >= n[:, None]] = 0
        return ids
    return {"model": Scorer(), "chosen_ids": rows(), "rejected_ids": rows(), "margin": torch.tensor([0., 1 / 3, 2 / 3, 1., 1 / 3])}


def right(model, batch, center=0.01):
    c, r = model(batch["chosen_ids"]), model(batch["rejected_ids"])
    return -F.logsigmoid(c - r - batch["margin"]).mean() + center * (c + r).square().mean(), {"accuracy": (c > r).float().mean().item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    import math
    d = make(0); model = d.pop("model"); slow = 0.0
    for i in range(5):
        f = lambda ids: model(ids[i][ids[i] != 0][None]).item()
        c, r = f(d["chosen_ids"]), f(d["rejected_ids"])
        slow += (math.log(1 + math.exp(-(c - r - float(d["margin"][i])))) + 0.01 * (c + r) ** 2) / 5
    check(right(model, d)[0], slow, model)
