"""GMPO (Geometric-Mean Policy Optimization, arXiv:2507.20673): the row's objective is the geometric mean of token ratios; the clip acts per token
in log space, on the side that the sign of the advantage selects, before the mean. There is no min() of two surrogates and the row is not multiplied by its length."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained completion token, [rows, time]; each row has at least one",
    "old_logps": "log-prob of each token under the sampling policy, [rows, time], entry t belongs to token t (entry 0 unused), constant",
    "advantages": "one advantage per row, [rows], constant",
}
SETTINGS = {"eps": "bound of the token log-ratio, 0.4 (ratio between exp(-0.4) and exp(0.4))"}
NOTES = ("GMPO. d_t = logp_t - old_logp_t. With s = sign(A) of the row, the token's pessimistic log-ratio is s * min(s*d_t, clip(s*d_t, -eps, eps)): only the side that would increase the objective is bounded. "
         "Row objective = A * exp(mean of it over the row's trained tokens); loss = minus the mean over rows (each row weighs the same). "
         "Old log-probs and advantages are constants. The log-prob of token t is read from the logits at t-1. All parameters are used.")

V = 24


class TinyLM(nn.Module):
    """A causal model: ids [rows, time] -> logits [rows, time, V]; the logits at t see the tokens up to t."""

    def __init__(self, width=16):
        super().__init__()
        self.emb = nn.Embedding(V, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, V)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def token_logps(model, ids):
    """log-prob of each token given the ones before it, [rows, time]; entry 0 is 0 (nothing predicts it)"""
    lp = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    ids = torch.randint(1, V, (4, 9), generator=g)
    mask = torch.zeros(4, 9)
    for i, n in enumerate([7, 3, 4, 6]):
        mask[i, 2:2 + n] = 1
    with torch.no_grad():
        old = token_logps(model, ids) + 0.4 * torch.randn(4, 9, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.tensor([1.0, -0.5, 0.7, -1.2])}


def right(model, batch, eps=0.4):
    logp, m = token_logps(model, batch["ids"])[:, 1:], batch["loss_mask"][:, 1:]
    A = batch["advantages"]
    s = A.sign()[:, None]
    d = s * (logp - batch["old_logps"][:, 1:])
    d = s * torch.minimum(d, d.clamp(-eps, eps))
    ratio = ((d * m).sum(1) / m.sum(1)).exp()
    return -(A * ratio).mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); loss.backward(); grad = model.out.weight.grad.clone(); model.zero_grad()
    total = 0.0
    for i in range(4):
        prod, n = 1.0, 0
        for t in range(1, 9):
            if b["loss_mask"][i, t]:
                lp = model(b["ids"][i:i + 1, :t]).log_softmax(-1)[0, -1, b["ids"][i, t]]
                r = (lp - b["old_logps"][i, t]).exp()
                r = torch.clamp(r, max=2.718281828 ** 0.4) if b["advantages"][i] > 0 else torch.clamp(r, min=2.718281828 ** -0.4)
                prod, n = prod * r, n + 1
        total = total - b["advantages"][i] * prod ** (1 / n) / 4
    total.backward()
    print(loss.item(), total.item(), grad.norm().item())
    assert torch.allclose(loss, total, atol=1e-5) and torch.allclose(grad, model.out.weight.grad, atol=1e-5) and grad.norm() > 0
