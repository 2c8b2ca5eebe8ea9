"""Listwise preference: the Plackett-Luce likelihood of a whole ranking with DPO rewards, written with a flipped logcumsumexp, and the last place contributes nothing (DPO appendix A.3; LiPO; PRO). The double flip looks like a reversed order."""
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
INPUTS = {"ids": "k answers to each prompt, best first, [prompts, k, time]", "loss_mask": "1 on response, [prompts, k, time]", "ref_logps": "reference sequence logps, [prompts, k]"}
SETTINGS = {"beta": "0.1"}
NOTES = "Sum of logp over tokens; sum over places of a ranking; mean over prompts. ref_logps constants. Order of k matters (best first). All parameters used; any number of prompts."


def make(seed):
    torch.manual_seed(seed)
    model, ids, m = TinyLM(), torch.randint(0, 31, (3, 4, 10)), response_mask(12, 10).view(3, 4, 10)
    with torch.no_grad():
        ref = (token_logps(model, ids.flatten(0, 1)) * m.flatten(0, 1)[:, 1:]).sum(1).view(3, 4) + 2 * torch.randn(3, 4)
    return {"model": model, "ids": ids, "loss_mask": m, "ref_logps": ref}


def right(model, batch, beta=0.1):
    p, k, T = batch["ids"].shape
    lp = (token_logps(model, batch["ids"].view(p * k, T)) * batch["loss_mask"].view(p * k, T)[:, 1:]).sum(1).view(p, k)
    r = beta * (lp - batch["ref_logps"])
    tail = r.flip(1).logcumsumexp(1).flip(1)            # logsumexp over this place and all worse ones
    return (tail - r).sum(1).mean()


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    want = 0.0
    for i in range(3):
        lp = token_logps(model, d["ids"][i]).detach()
        r = [0.1 * (float((lp[j] * d["loss_mask"][i, j, 1:]).sum()) - float(d["ref_logps"][i, j])) for j in range(4)]
        for j in range(4):
            want -= math.log(math.exp(r[j]) / sum(math.exp(x) for x in r[j:])) / 3
    assert abs(float(loss) - want) < 1e-4 and not dead
    print("ok", float(loss), want)
