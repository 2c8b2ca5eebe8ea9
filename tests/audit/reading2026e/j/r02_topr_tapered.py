"""TOPR: positive samples get plain log-likelihood without any importance ratio, negative samples get a detached ratio truncated to [0, 1]. The asymmetry and the missing ratio look like bugs; it is the tapered off-policy REINFORCE of Le Roux et al. 2025."""
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
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens", "behaviour_logps": "sequence logp under the data-collecting policy, [rows]",
          "rewards": "+1 or -1 per row, [rows]"}
SETTINGS = {}
NOTES = "Sum over the tokens of a row, mean over all rows. The taper weight is a constant (no gradient). No baseline on purpose. All parameters used; any number of rows."


def make(seed):
    torch.manual_seed(seed)
    model, ids, m = TinyLM(), torch.randint(0, 31, (6, 10)), response_mask(6, 10)
    with torch.no_grad():
        b = (token_logps(model, ids) * m[:, 1:]).sum(1) + 0.5 * torch.randn(6)
    return {"model": model, "ids": ids, "loss_mask": m, "behaviour_logps": b, "rewards": torch.tensor([1., -1., -1., 1., -1., 1.])[torch.randperm(6)]}


def right(model, batch):
    lp = (token_logps(model, batch["ids"]) * batch["loss_mask"][:, 1:]).sum(1)
    taper = (lp.detach() - batch["behaviour_logps"]).clamp(max=0).exp()
    weight = torch.where(batch["rewards"] > 0, torch.ones_like(taper), taper)
    return -(weight * batch["rewards"] * lp).mean()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    want = 0.0
    for i in range(6):
        one = token_logps(model, d["ids"][i:i + 1])[0].detach()
        lp = sum(float(one[t - 1]) for t in range(1, 10) if d["loss_mask"][i, t])
        r = float(d["rewards"][i])
        w = 1.0 if r > 0 else min(1.0, float(torch.tensor(lp - float(d["behaviour_logps"][i])).exp()))
        want -= w * r * lp / 6
    assert abs(float(loss) - want) < 1e-3 and not dead, (loss, want, dead)
    print("ok", float(loss), want)
