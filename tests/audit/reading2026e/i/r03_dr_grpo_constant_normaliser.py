"""Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training"). The token sum is divided by a CONSTANT generation budget
times the number of rows, never by the actual lengths, and the advantage is not divided by the group's standard deviation."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the target ids[:, 1:] is a completion token, [rows, time-1]",
          "rewards": "reward per row, [rows], constant", "groups": "integer prompt group of each row, [rows]"}
SETTINGS = {"budget": "maximal completion length, a constant of the run, 16 tokens"}
NOTES = "Sum over trained tokens / (rows * budget): longer completions weigh more, and the padding width does not matter. Strictly on-policy (exp(lp - lp.detach()), value 1). budget is a setting that divides. A group of one row has advantage 0. All parameters used."
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
    ids, mask = fake_rows(g, 8)
    return {"model": Tiny(), "ids": ids, "loss_mask": mask, "rewards": torch.rand(8, generator=g), "groups": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])}


def right(model, batch, budget=16):
    r, grp, m = batch["rewards"], batch["groups"], batch["loss_mask"]
    same = (grp[:, None] == grp[None]).to(r.dtype)
    adv = r - (same @ r) / same.sum(1)
    lp = logps(model, batch["ids"])
    ratio = (lp - lp.detach()).exp()
    return -(ratio * adv[:, None] * m).sum() / (len(r) * budget)


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    slow = 0.0
    for i in range(8):
        peers = [float(d["rewards"][j]) for j in range(8) if d["groups"][j] == d["groups"][i]]
        slow -= (float(d["rewards"][i]) - sum(peers) / len(peers)) * int(d["loss_mask"][i].sum()) / (8 * 16)
    check(right(model, d), slow, model)
