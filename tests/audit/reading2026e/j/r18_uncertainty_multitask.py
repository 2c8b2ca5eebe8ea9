"""Multi-task loss with learned homoscedastic uncertainty: each task is multiplied by exp(-s) (half that for the regression) and s/2 is added, with s a parameter of the model, so the loss can become negative. The regulariser keeps s from running away (Kendall, Gal, Cipolla 2018)."""
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

FAMILY = "multi-task"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained", "score": "regression target of a row, [rows]", "has_score": "1 where the row has a score, [rows]"}
SETTINGS = {}
NOTES = "Language task: mean over trained tokens of all rows. Score task: mean over rows that have a score, read at the last position. Weights are learned through model.log_var (trainable). May be negative. All parameters used."


class TwoTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = TinyLM()
        self.score = nn.Linear(16, 1)
        self.log_var = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, ids):
        h = self.lm.hidden(ids)
        return self.lm.head(h), self.score(h[:, -1])[:, 0]


def make(seed):
    torch.manual_seed(seed)
    m = torch.ones(4, 10)
    m[:, :2], m[3, 6:] = 0, 0
    return {"model": TwoTask(), "ids": torch.randint(0, 31, (4, 10)), "loss_mask": m, "score": torch.randn(4), "has_score": torch.tensor([1., 0., 1., 1.])}


def right(model, batch):
    logits, pred = model(batch["ids"])
    m = batch["loss_mask"][:, 1:]
    ce = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    lm = (ce * m).sum() / m.sum()
    h = batch["has_score"]
    mse = ((pred - batch["score"]).square() * h).sum() / h.sum().clamp(min=1)
    s = model.log_var
    return (-s[0]).exp() * lm + 0.5 * s[0] + 0.5 * (-s[1]).exp() * mse + 0.5 * s[1], {"lm": lm.detach(), "mse": mse.detach()}


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lg, pr = model(d["ids"])
    lp = lg.log_softmax(-1).detach()
    toks = [(i, t) for i in range(4) for t in range(1, 10) if d["loss_mask"][i, t]]
    lm = sum(-float(lp[i, t - 1, d["ids"][i, t]]) for i, t in toks) / len(toks)
    mse = sum((float(pr[i].detach()) - float(d["score"][i])) ** 2 for i in (0, 2, 3)) / 3
    want = math.exp(-0.3) * lm + 0.15 + 0.5 * math.exp(0.2) * mse - 0.1
    assert abs(float(loss) - want) < 1e-4 and not dead
    print("ok", float(loss), want, model.log_var.grad.tolist())
