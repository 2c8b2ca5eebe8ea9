"""Trajectory balance with the VarGrad estimate of log Z (Richter et al. 2020; TBA, Bartoldson et al. 2025). A squared error whose
"target" log Z is the group's own mean, detached; no old policy, no ratio, and it is right for data of any age."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "ref_logps": "log probabilities under the frozen reference, [rows, time-1], constant", "rewards": "[rows], constant", "groups": "integer prompt group of each row, [rows]"}
SETTINGS = {"beta": "KL temperature; the reward is divided by it, 0.5"}
NOTES = "Mean over rows of the squared deviation from the group's mean; log ratios are SUMMED over the row's tokens (never averaged). Groups need two rows or more to give a gradient. Detaching the mean changes nothing in the gradient because deviations sum to zero. All parameters used."
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
    ids, mask = fake_rows(g, 8)
    with torch.no_grad():
        ref = logps(Tiny(), ids)
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_logps": ref * mask, "rewards": torch.rand(8, generator=g), "groups": torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])}


def right(model, batch, beta=0.5):
    m, grp = batch["loss_mask"], batch["groups"]
    z = ((logps(model, batch["ids"]) - batch["ref_logps"]) * m).sum(1) - batch["rewards"] / beta
    same = (grp[:, None] == grp[None]).to(z.dtype)
    minus_log_z = ((same @ z) / same.sum(1)).detach()
    return (z - minus_log_z).square().mean()


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    lp, zs = logps(model, d["ids"]).detach(), []
    for i in range(8):
        zs.append(sum(float(lp[i, k] - d["ref_logps"][i, k]) for k in range(9) if d["loss_mask"][i, k]) - float(d["rewards"][i]) / 0.5)
    slow = 0.0
    for grp in ([0, 1, 2], [3, 4, 5], [6, 7]):
        mu = sum(zs[i] for i in grp) / len(grp)
        slow += sum((zs[i] - mu) ** 2 for i in grp) / 8
    check(right(model, d), slow, model)
