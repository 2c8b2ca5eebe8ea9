"""Dual-clip PPO: for negative advantages the objective has a second bound, max(min(rA, clip(r)A), cA) with c = 3, so the min of PPO sits inside a max (Ye et al. 2020; verl's clip_ratio_c). It stops a huge ratio with a negative advantage from giving an unbounded loss."""
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

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens", "old_logps": "[rows, time], column 0 unused", "advantages": "per token, [rows, time]"}
SETTINGS = {"clip": "PPO clip, 0.2", "c": "bound of the ratio for negative advantages, 3.0 (> 1)"}
NOTES = "Mean over trained tokens of all rows. old_logps and advantages are constants. All parameters used; any number of rows."


def make(seed):
    torch.manual_seed(seed)
    model, ids, m = TinyLM(), torch.randint(0, 31, (4, 12)), response_mask(4, 12)
    with torch.no_grad():
        old = F.pad(token_logps(model, ids), (1, 0)) + 1.5 * torch.randn(4, 12)
    return {"model": model, "ids": ids, "loss_mask": m, "old_logps": old, "advantages": torch.randn(4, 12)}


def right(model, batch, clip=0.2, c=3.0):
    m, a = batch["loss_mask"][:, 1:], batch["advantages"][:, 1:]
    ratio = (token_logps(model, batch["ids"]) - batch["old_logps"][:, 1:]).clamp(-20, 20).exp()
    obj = torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    obj = torch.where(a < 0, torch.max(obj, c * a), obj)
    hit = ((a < 0) & (ratio > c)).float()
    return -(obj * m).sum() / m.sum(), {"lower_clip_frac": ((hit * m).sum() / m.sum()).detach()}


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lp = token_logps(model, d["ids"]).detach()
    tot = n = 0.0
    for i in range(4):
        for t in range(1, 12):
            if d["loss_mask"][i, t]:
                r, a = float((lp[i, t - 1] - d["old_logps"][i, t]).exp()), float(d["advantages"][i, t])
                o = min(r * a, max(0.8, min(1.2, r)) * a)
                tot -= max(o, 3 * a) if a < 0 else o
                n += 1
    assert abs(float(loss) - tot / n) < 1e-4 and not dead
    print("ok", float(loss), tot / n, out[1])
