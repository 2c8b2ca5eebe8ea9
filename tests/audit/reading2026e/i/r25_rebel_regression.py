"""REBEL (Gao et al. 2024). RL as least squares: the DIFFERENCE of log ratios of two answers to one prompt, over eta, is regressed on the difference
of their rewards. No sigmoid, no clip; log ratios are against the previous iterate, not a fixed reference."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "[2*pairs, time]; rows 2i and 2i+1 answer the same prompt", "loss_mask": "[2*pairs, time-1]", "old_logps": "summed log probability under the previous iterate, [2*pairs], constant", "rewards": "[2*pairs], constant"}
SETTINGS = {"eta": "step size; it divides the log ratio, 1.0"}
NOTES = "Mean over pairs of a squared error; log probabilities summed over completion tokens. Needs an EVEN number of rows, in pair order. All parameters used."
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
    ids, m = fake_rows(g, 8); ids[1::2, :3] = ids[::2, :3]
    with torch.no_grad():
        old = (logps(model, ids) * m).sum(1)
    return {"model": model, "ids": ids, "loss_mask": m, "old_logps": old + 0.5 * torch.randn(8, generator=g), "rewards": torch.randn(8, generator=g)}


def right(model, batch, eta=1.0):
    h = (logps(model, batch["ids"]) * batch["loss_mask"]).sum(1) - batch["old_logps"]
    dh, dr = h[::2] - h[1::2], batch["rewards"][::2] - batch["rewards"][1::2]
    return (dh / eta - dr).square().mean()


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    h = [sum(float(x) for x, k in zip(logps(model, d["ids"][i:i + 1])[0].detach(), d["loss_mask"][i]) if k) - float(d["old_logps"][i]) for i in range(8)]
    slow = sum((h[i] - h[i + 1] - float(d["rewards"][i] - d["rewards"][i + 1])) ** 2 for i in range(0, 8, 2)) / 4
    check(right(model, d), slow, model)
