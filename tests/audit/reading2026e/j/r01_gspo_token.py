"""GSPO-token: every token of a row carries the same sequence ratio (geometric mean of the token ratios), written as sg[s_i] * p / sg[p], which looks like a ratio that is always one. Its value is the sequence ratio, its gradient is that of each token's logp (Zheng et al. 2025, GSPO, section 4.3)."""
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
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens, [rows, time]",
          "old_logps": "logp of token t under the sampling policy, [rows, time], column 0 unused", "advantages": "one per token, [rows, time]"}
SETTINGS = {"eps_low": "lower clip of the sequence ratio, 3e-2 here (paper 3e-4)", "eps_high": "upper clip, 4e-2 here (paper 4e-4)"}
NOTES = "Mean over tokens within a row, then mean over rows. old_logps and advantages are constants. All parameters used. Any number of rows; every row has a response token."


def make(seed):
    torch.manual_seed(seed)
    model, ids, m = TinyLM(), torch.randint(0, 31, (4, 12)), response_mask(4, 12)
    with torch.no_grad():
        old = F.pad(token_logps(model, ids), (1, 0)) + 0.05 * torch.randn(4, 12)
    return {"model": model, "ids": ids, "loss_mask": m, "old_logps": old, "advantages": torch.randn(4, 1).expand(4, 12).clone()}


def right(model, batch, eps_low=3e-2, eps_high=4e-2):
    m = batch["loss_mask"][:, 1:]
    lp = token_logps(model, batch["ids"])
    n = m.sum(1)
    log_s = ((lp - batch["old_logps"][:, 1:]) * m).sum(1) / n
    log_ratio = log_s.detach()[:, None] + lp - lp.detach()
    ratio = log_ratio.exp()
    a = batch["advantages"][:, 1:]
    obj = torch.min(ratio * a, ratio.clamp(1 - eps_low, 1 + eps_high) * a)
    return -((obj * m).sum(1) / n).mean()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lp = token_logps(model, d["ids"]).detach()
    want = 0.0
    for i in range(4):
        idx = [t for t in range(1, 12) if d["loss_mask"][i, t] > 0]
        s = torch.stack([lp[i, t - 1] - d["old_logps"][i, t] for t in idx]).mean().exp()
        a = d["advantages"][i, 0]
        want -= min(s * a, s.clamp(0.97, 1.04) * a) / 4
    assert torch.allclose(loss, want, atol=1e-5) and not dead, (loss, want, dead)
    print("ok", float(loss), float(want))
