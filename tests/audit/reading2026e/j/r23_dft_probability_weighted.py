"""Dynamic fine-tuning: the SFT loss of a token times its own detached probability, -sg[p] log p. It looks as if the loss is weighted the wrong way round (easy tokens more); it cancels the implicit 1/p weight of SFT seen as policy gradient (Wu et al. 2025, DFT)."""
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
INPUTS = {"ids": "token ids, [rows, time]", "labels": "ids or -100, [rows, time]"}
SETTINGS = {}
NOTES = "Mean over trained tokens of all rows; the weight has no gradient and does not enter the normaliser. The gradient equals that of -mean p. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 31, (4, 12))
    labels = ids.clone()
    labels[:, :4], labels[2, 9:] = -100, -100
    return {"model": TinyLM(), "ids": ids, "labels": labels}


def right(model, batch):
    y = batch["labels"][:, 1:]
    ce = F.cross_entropy(model(batch["ids"])[:, :-1].transpose(1, 2), y, ignore_index=-100, reduction="none")
    return (ce * (-ce).exp().detach()).sum() / (y != -100).sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    y = d["labels"][:, 1:]
    p = model(d["ids"])[:, :-1].softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0][y != -100]
    want = (-p * p.log()).mean().detach()
    g, = torch.autograd.grad(-p.mean(), model.head.weight)
    assert torch.allclose(loss, want, atol=1e-6) and torch.allclose(g, model.head.weight.grad, atol=1e-6) and not dead
    print("ok", float(loss), float(want), float(g.norm()))
