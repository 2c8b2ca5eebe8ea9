"""Multi-token prediction (DeepSeek-V3). An extra module sees the hidden state of t and the EMBEDDING OF TOKEN t+1 (the label of the main head) and predicts t+2 with the shared head. It looks like a leak of the target; it is not, since t+1 lies before t+2."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "1 on trained tokens, [rows, time]"}
SETTINGS = {"lam": "weight of the second prediction, 0.3"}
NOTES = "Cross-entropy; two means: over trained tokens as next token, and over trained tokens as token after next (each with its own count). Embedding and head are shared. All parameters used; rows need three tokens."
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


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


class Mtp(Tiny):
    def __init__(self):
        super().__init__()
        self.join = nn.Linear(2 * D, D, bias=False)
        self.rnn2 = nn.GRU(D, D, batch_first=True)

    def forward(self, ids):
        h = self.hidden(ids)
        x = torch.cat([F.rms_norm(h[:, :-1], (D,)), F.rms_norm(self.emb(ids[:, 1:]), (D,))], -1)
        return self.head(h), self.head(self.rnn2(self.join(x))[0])


def make(seed):
    _, ids, mask = base_rows(seed)
    torch.manual_seed(seed)
    return {"model": Mtp(), "ids": ids, "loss_mask": mask}


def masked_ce(logits, ids, m):
    ce = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    return (ce * m).sum() / m.sum().clamp(min=1)


def right(model, batch, lam=0.3):
    ids, m = batch["ids"], batch["loss_mask"]
    one, two = model(ids)
    return masked_ce(one[:, :-1], ids[:, 1:], m[:, 1:]) + lam * masked_ce(two[:, :-1], ids[:, 2:], m[:, 2:])


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss)
    one, two = model(b["ids"]); A, na, B, nb = 0., 0, 0., 0
    for i, t in b["loss_mask"].nonzero().tolist():
        A -= one[i, t - 1].log_softmax(0)[b["ids"][i, t]].item(); na += 1
        B -= two[i, t - 2].log_softmax(0)[b["ids"][i, t]].item(); nb += 1
    # no leak: changing token t does not change the prediction of t
    ids2 = b["ids"].clone(); ids2[:, 5] = (ids2[:, 5] + 1) % V
    same = torch.allclose(model(ids2)[1][:, :4], two[:, :4])
    assert abs(loss.item() - A / na - .3 * B / nb) < 1e-4 and same and g.norm() > 0
    print("loss", loss.item(), "no leak:", same, "grad", g.norm().item())
