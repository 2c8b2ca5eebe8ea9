"""Cross-entropy plus z-loss: 1e-4 * logsumexp(logits)^2 on the trained positions. The extra term changes the value of the loss although it does not change the argmin of the probabilities; it stops the logits from drifting (PaLM, section 5; Mesh-TF; OLMo). Labels carry -100 and are shifted inside."""
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

FAMILY = "supervised"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "ids, or -100 where not trained, [rows, time]"}
SETTINGS = {"z": "coefficient, 1e-2 here (paper 1e-4)"}
NOTES = "Mean over trained tokens of all rows for both terms; z-loss is differentiated. Not invariant to adding a constant to all logits, on purpose. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 31, (4, 12))
    labels = ids.clone()
    labels[:, :3], labels[1, 8:] = -100, -100
    return {"model": TinyLM(), "ids": ids, "labels": labels}


def right(model, batch, z=1e-2):
    logits, y = model(batch["ids"])[:, :-1], batch["labels"][:, 1:]
    keep = y != -100
    logits, y = logits[keep], y[keep]                    # [tokens, vocab]
    lse = logits.logsumexp(-1)
    nll = lse - logits.gather(-1, y[:, None])[:, 0]
    return (nll + z * lse.square()).mean(), {"ce": nll.mean().detach()}


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lg = model(d["ids"]).detach()
    tot = n = 0.0
    for i in range(4):
        for t in range(1, 12):
            if d["labels"][i, t] != -100:
                row = lg[i, t - 1].tolist()
                l = math.log(sum(math.exp(x) for x in row))
                tot += l - row[int(d["ids"][i, t])] + 0.01 * l * l
                n += 1
    assert abs(float(loss) - tot / n) < 1e-4 and not dead
    print("ok", float(loss), tot / n, out[1])
