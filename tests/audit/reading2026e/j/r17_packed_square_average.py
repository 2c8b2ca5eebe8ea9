"""Square averaging over packed documents: every trained token is weighted by 1/sqrt(trained tokens of its document) and the sum is divided by the sum of weights, a middle way between token mean and sample mean (InternVL 2.5, section on 'square averaging'). Documents attend over the whole row here, as in plain concat-and-chunk."""
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

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed ids, [rows, time]", "doc": "document number unique in the batch from 0, [rows, time]", "loss_mask": "1 where the token is trained, never on the first column"}
SETTINGS = {"power": "exponent of the length in the weight, 0.5 (0: token mean, 1: sample mean)"}
NOTES = "Weighted mean with weight len(doc)^-0.5, normaliser = sum of weights over the whole batch. Weights are constants. Documents without trained tokens do not count. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    doc = torch.stack([torch.repeat_interleave(torch.arange(0, 3), torch.tensor([3, 9, 4])), torch.repeat_interleave(torch.arange(3, 5), torch.tensor([12, 4]))])
    m = (torch.rand(2, 16) > 0.3).float()
    m[:, 0] = 0
    m[:, 1] = 1
    return {"model": TinyLM(), "ids": torch.randint(0, 31, (2, 16)), "doc": doc, "loss_mask": m}


def right(model, batch, power=0.5):
    ids, m = batch["ids"], batch["loss_mask"]
    length = torch.zeros(int(batch["doc"].max()) + 1).index_add_(0, batch["doc"].flatten(), m.flatten())
    w = (m * length.clamp(min=1)[batch["doc"]].pow(-power))[:, 1:]
    nll = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (nll * w).sum() / w.sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lp = model(d["ids"]).log_softmax(-1).detach()
    num = den = 0.0
    for k in range(5):
        toks = [(i, t) for i in range(2) for t in range(16) if d["doc"][i, t] == k and d["loss_mask"][i, t]]
        if toks:
            num += len(toks) ** -0.5 * sum(-float(lp[i, t - 1, d["ids"][i, t]]) for i, t in toks)
            den += len(toks) ** 0.5
    assert abs(float(loss) - num / den) < 1e-4 and not dead
    print("ok", float(loss), num / den)
