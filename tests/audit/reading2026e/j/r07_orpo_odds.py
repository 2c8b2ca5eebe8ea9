"""ORPO: no reference model; SFT on the chosen row plus the log odds ratio of mean token probabilities, log odds = lp - log1p(-exp(lp)) with lp the length mean. Odds of a length-averaged logp look wrong, but it is the definition (Hong et al. 2024; TRL ORPOTrainer)."""
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


def token_logps(model, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 .. T-1, shape [rows, T-1]."""
    lp = model(ids)[:, :-1].log_softmax(-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def response_mask(rows, T, prompt=3):
    """1 on the response tokens; ragged ends, at least two tokens each."""
    m = torch.zeros(rows, T)
    for i in range(rows):
        m[i, prompt:int(torch.randint(prompt + 2, T + 1, (1,)))] = 1
    return m

FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "2n rows, first n chosen and last n rejected, [2n, time]", "loss_mask": "1 on response tokens"}
SETTINGS = {"lam": "weight of the odds term, 0.1"}
NOTES = "SFT part: mean over trained tokens of all chosen rows; odds part: mean over pairs. Needs an even number of rows, row i paired with row n+i. Reference-free. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(), "ids": torch.randint(0, 31, (6, 12)), "loss_mask": response_mask(6, 12)}


def right(model, batch, lam=0.1):
    m = batch["loss_mask"][:, 1:]
    lp = token_logps(model, batch["ids"]) * m
    n = lp.shape[0] // 2
    mean = lp.sum(1) / m.sum(1)
    log_odds = mean - torch.log1p(-mean.exp())
    nll = -lp[:n].sum() / m[:n].sum()
    return nll - lam * F.logsigmoid(log_odds[:n] - log_odds[n:]).mean()


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lp = token_logps(model, d["ids"]).detach().double()
    means, s, c = [], 0.0, 0
    for i in range(6):
        v = [float(lp[i, t - 1]) for t in range(1, 12) if d["loss_mask"][i, t]]
        means.append(sum(v) / len(v))
        if i < 3:
            s, c = s - sum(v), c + len(v)
    odds = [math.exp(x) / (1 - math.exp(x)) for x in means]
    want = s / c - 0.1 * sum(math.log(odds[i] / (odds[i] + odds[i + 3])) for i in range(3)) / 3   # sigma(log r) = r/(1+r)
    assert abs(float(loss) - want) < 1e-4 and not dead
    print("ok", float(loss), want)
