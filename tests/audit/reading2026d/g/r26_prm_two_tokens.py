"""Process reward model in the Math-Shepherd style. At each step tag the logits of only TWO tokens ('+', '-') are compared, read AT the tag's own position with no shift; all other logits are ignored. Right: the label is not part of the text."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "[rows, time] with the tag token 22 after each step", "step_label": "1 good, 0 bad, at tag positions, -100 elsewhere, [rows, time]"}
SETTINGS = {"plus": "id of '+', 20", "minus": "id of '-', 21"}
NOTES = "Two-class cross-entropy; mean over tagged steps of all rows. Not shifted. Only two rows of the head get a gradient, by intent."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 20, (4, 12)); ids[:, [3, 7, 11]] = 22
    lab = torch.where(ids == 22, torch.randint(0, 2, (4, 12)), torch.tensor(-100))
    return {"model": Tiny(), "ids": ids, "step_label": lab}


def right(model, batch, plus=20, minus=21):
    two = model(batch["ids"])[..., [minus, plus]]
    return F.cross_entropy(two.reshape(-1, 2), batch["step_label"].reshape(-1), ignore_index=-100)


if __name__ == "__main__":
    b = make(0); model = b.pop("model"); loss = right(model, b); out = model(b["ids"]); tot = []
    for i, t in (b["ids"] == 22).nonzero().tolist():
        p = torch.sigmoid(out[i, t, 20] - out[i, t, 21])
        tot.append(-(p if b["step_label"][i, t] == 1 else 1 - p).log())
    g = flat_grad(model, loss)
    assert torch.allclose(loss, torch.stack(tot).mean(), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "grad", g.norm().item())
