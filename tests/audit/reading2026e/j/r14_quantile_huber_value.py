"""Distributional critic with the quantile Huber loss: an asymmetric weight |tau - 1[u < 0]| with the indicator detached, errors target - prediction, summed over predicted quantiles and averaged over target samples (Dabney et al. 2017, QR-DQN). The asymmetric weight looks like a sign bug; it makes the heads learn quantiles."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))

FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "last": "index of the position where the value is read, [rows]", "targets": "samples of the return, [rows, samples]"}
SETTINGS = {"kappa": "Huber threshold, 1.0"}
NOTES = "Sum over the 7 quantile outputs, mean over target samples, mean over rows. Only the position `last` of each row is read. targets are constants. All parameters used; any number of rows."


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(out=7), "ids": torch.randint(0, 31, (4, 10)), "last": torch.randint(4, 10, (4,)), "targets": 1.5 * torch.randn(4, 6)}


def right(model, batch, kappa=1.0):
    z = model(batch["ids"])[torch.arange(len(batch["ids"])), batch["last"]]            # [rows, quantiles]
    n = z.shape[1]
    tau = (torch.arange(n) + 0.5) / n
    u = batch["targets"][:, None, :] - z[:, :, None]                                   # [rows, quantiles, samples]
    huber = torch.where(u.abs() <= kappa, 0.5 * u.square(), kappa * (u.abs() - 0.5 * kappa))
    weight = (tau[None, :, None] - (u.detach() < 0).to(u.dtype)).abs()
    return (weight * huber / kappa).mean(2).sum(1).mean()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    z = model(d["ids"]).detach()
    want = 0.0
    for i in range(4):
        for q in range(7):
            for y in d["targets"][i].tolist():
                u = y - float(z[i, d["last"][i], q])
                h = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                want += abs((q + 0.5) / 7 - (u < 0)) * h / 6 / 4
    assert abs(float(loss) - want) < 1e-4 and not dead
    print("ok", float(loss), want)
