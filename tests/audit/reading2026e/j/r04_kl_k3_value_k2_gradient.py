"""KL penalty whose value is the k3 estimator (exp(-d) - 1 + d) and whose gradient is that of k2 (d^2 / 2), joined by a straight-through term: k2 - k2.detach() + k3.detach(). k3 has the better value, k2 has the unbiased gradient of the reverse KL (Schulman's note; verl's 'low_var_kl+')."""
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
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens", "ref_logps": "reference logps, [rows, time], column 0 unused", "advantages": "[rows]"}
SETTINGS = {"beta": "KL coefficient, 0.1"}
NOTES = "On-policy REINFORCE plus KL in the loss; mean over trained tokens of all rows. ref_logps and advantages are constants. The derivative of the loss is by design not the derivative of its value. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    model, ids, m = TinyLM(), torch.randint(0, 31, (4, 12)), response_mask(4, 12)
    with torch.no_grad():
        ref = F.pad(token_logps(model, ids), (1, 0)) + 0.3 * torch.randn(4, 12)
    return {"model": model, "ids": ids, "loss_mask": m, "ref_logps": ref, "advantages": torch.randn(4)}


def right(model, batch, beta=0.1):
    m = batch["loss_mask"][:, 1:]
    lp = token_logps(model, batch["ids"])
    diff = lp - batch["ref_logps"][:, 1:]
    k2 = 0.5 * diff.square()
    k3 = (-diff).exp() - 1 + diff
    kl = k2 - k2.detach() + k3.detach()
    pg = -batch["advantages"][:, None] * (lp - lp.detach()).exp()
    return ((pg + beta * kl) * m).sum() / m.sum(), {"kl": (k3 * m).sum().detach() / m.sum()}


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    got = model.head.bias.grad.clone()
    m = d["loss_mask"][:, 1:]
    lp = token_logps(model, d["ids"])
    diff = (lp - d["ref_logps"][:, 1:]).detach()
    value = ((-d["advantages"][:, None] + 0.1 * (torch.exp(-diff) - 1 + diff)) * m).sum() / m.sum()
    g, = torch.autograd.grad((((-d["advantages"][:, None] + 0.1 * diff) * lp) * m).sum() / m.sum(), model.head.bias)
    assert torch.allclose(value, loss, atol=1e-5) and torch.allclose(g, got, atol=1e-5) and not dead
    print("ok", float(loss), float(value), float(got.norm()))
