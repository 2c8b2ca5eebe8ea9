"""Packed documents in a recurrent (SSM) model. There is no attention mask to separate the documents: the state is cut by setting the decay to 0 at each document's first token, and the short causal convolution masks its taps that reach into another document (seq_idx in Mamba-2 / causal-conv1d)."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "seq_idx": "[rows, time], document number in the row, -1 for padding at the end"}
SETTINGS = {}
NOTES = "Supervised. Reduction: mean over all targets of all rows (tokens with a predecessor in the same document). Documents are contiguous. Parameters are all used; `decay` is a logit per channel. The model has no positions."
import torch
from torch import nn


class TinySSM(nn.Module):
    def __init__(self, vocab=32, width=16, taps=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.conv = nn.Parameter(torch.randn(taps, width) * 0.5)
        self.decay = nn.Parameter(torch.randn(width) + 1)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, seq_idx=None):
        if seq_idx is None:
            seq_idx = torch.zeros_like(ids)
        x = self.emb(ids)
        T = x.shape[1]
        u = x * self.conv[0]
        for j in range(1, min(len(self.conv), T)):
            same = (seq_idx[:, j:] == seq_idx[:, :-j])[..., None]
            u = u + nn.functional.pad(x[:, :-j] * same * self.conv[j], (0, 0, j, 0))
        a, h, hs = self.decay.sigmoid(), torch.zeros_like(u[:, 0]), []
        for t in range(T):
            go = 0.0 if t == 0 else (seq_idx[:, t] == seq_idx[:, t - 1])[:, None].to(u.dtype)
            h = a * go * h + (1 - a) * u[:, t]
            hs.append(h)
        return self.head(torch.tanh(torch.stack(hs, 1) * 3))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    idx = torch.tensor([[0] * 6 + [1] * 2 + [2] * 8, [0] * 1 + [1] * 11 + [-1] * 4])
    return {"model": TinySSM(), "ids": torch.randint(1, 32, idx.shape, generator=g) * (idx >= 0), "seq_idx": idx}


def right(model, batch):
    ids, s = batch["ids"], batch["seq_idx"]
    nll = -model(ids, s)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    on = (s[:, 1:] == s[:, :-1]) & (s[:, 1:] >= 0)
    return (nll * on).sum() / on.sum().clamp(min=1)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    loss.backward()
    v = []
    for r in range(2):
        for k in range(int(b["seq_idx"][r].max()) + 1):
            d = b["ids"][r][b["seq_idx"][r] == k]
            lp = m(d[None])[0].log_softmax(-1)
            v += [-lp[t - 1, d[t]].item() for t in range(1, len(d))]
    gn = sum(p.grad.norm() for p in m.parameters())
    print(loss.item(), sum(v) / len(v), "grad", gn.item())
    assert abs(loss.item() - sum(v) / len(v)) < 1e-5 and gn > 0 and m.conv.grad.norm() > 0
