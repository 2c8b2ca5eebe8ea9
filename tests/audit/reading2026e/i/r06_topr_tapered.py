"""TOPR (Le Roux et al. 2025, tapered off-policy REINFORCE). Rows with positive reward get NO importance weight at all; rows with
negative reward get the whole-sequence ratio truncated to [0, 1], detached. The asymmetry is the method."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "old_logps": "log probabilities of the targets under the sampling policy, [rows, time-1], constant", "rewards": "+1 or -1 per row, [rows], constant"}
SETTINGS = {}
NOTES = "Mean over rows of -(weight * reward * SUM of log probabilities of the row's trained tokens); not divided by length. Weight is a constant. No baseline. All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tiny(nn.Module):
    """Causal language model: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]): [rows, time-1]."""
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def fake_rows(g, rows, time=10, prompt=3, vocab=31):
    """Right-padded ids (pad = 0) and the mask [rows, time-1] of the targets ids[:, 1:] that belong to the completion."""
    ids = torch.randint(1, vocab, (rows, time), generator=g)
    n = torch.randint(2, time - prompt + 1, (rows,), generator=g)
    pos = torch.arange(time)
    ids[pos >= (prompt + n)[:, None]] = 0
    mask = ((pos >= prompt) & (pos < (prompt + n)[:, None])).float()
    return ids, mask[:, 1:]

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = Tiny()
    ids, mask = fake_rows(g, 6)
    with torch.no_grad():
        old = logps(model, ids)
    old = (old + 0.4 * torch.randn(old.shape, generator=g)) * mask
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "rewards": torch.tensor([1., -1., -1., 1., -1., -1.])[torch.randperm(6, generator=g)]}


def right(model, batch):
    m, r = batch["loss_mask"], batch["rewards"]
    seq = (logps(model, batch["ids"]) * m).sum(1)
    truncated = (seq.detach() - (batch["old_logps"] * m).sum(1)).clamp(max=0).exp()
    weight = torch.where(r > 0, torch.ones_like(r), truncated)
    return -(weight * r * seq).mean()


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    lp, slow = logps(model, d["ids"]).detach(), 0.0
    for i in range(6):
        ks = [k for k in range(9) if d["loss_mask"][i, k]]
        s, o = sum(float(lp[i, k]) for k in ks), sum(float(d["old_logps"][i, k]) for k in ks)
        w = 1.0 if d["rewards"][i] > 0 else min(2.718281828 ** (s - o), 1.0)
        slow -= w * float(d["rewards"][i]) * s / 6
    check(right(model, d), slow, model)
