"""CISPO (MiniMax-M1, arXiv:2506.13585; TRL loss_type='cispo', verl, slime): the importance ratio is clamped from above only, detached,
and multiplies A * logp. The loss value means nothing (it holds raw log-probs) and there is no min(): no token is ever clipped out of the gradient."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
    "old_logps": "log-prob of each token under the sampling policy, [rows, time], entry t belongs to token t (entry 0 unused), constant",
    "advantages": "one advantage per row, [rows], constant",
}
SETTINGS = {"eps_high": "upper bound of the importance ratio itself (not 1 + eps), 1.3"}
NOTES = ("CISPO. Loss = -mean over all trained tokens of all rows of sg[min(ratio, eps_high)] * A * logp(token). ratio = exp(logp - old_logp), without gradient and without lower bound. "
         "The gradient is a REINFORCE gradient with truncated weights; every trained token has a gradient, also those whose ratio is above the bound. The value of the loss is not a surrogate objective. "
         "The log-prob of token t is read from the logits at t-1. All parameters are used. Any number of rows.")

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
    for i, n in enumerate([7, 5, 4, 6]):
        mask[i, 2:2 + n] = 1
    with torch.no_grad():
        old = token_logps(model, ids) + 0.3 * torch.randn(4, 9, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.tensor([1.0, -0.5, 0.7, -1.2])}


def right(model, batch, eps_high=1.3):
    logp, m = token_logps(model, batch["ids"])[:, 1:], batch["loss_mask"][:, 1:]
    weight = (logp - batch["old_logps"][:, 1:]).exp().clamp(max=eps_high).detach()
    return -(weight * batch["advantages"][:, None] * logp * m).sum() / m.sum().clamp(min=1)


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    right(model, b).backward(); grad = model.out.weight.grad.clone(); model.zero_grad()
    total, n, over = 0.0, 0, 0
    for i in range(4):
        for t in range(1, 9):
            if b["loss_mask"][i, t]:
                lp = model(b["ids"][i:i + 1, :t]).log_softmax(-1)[0, -1, b["ids"][i, t]]
                r = float((lp - b["old_logps"][i, t]).exp().detach()); over += r > 1.3
                total = total - min(r, 1.3) * b["advantages"][i] * lp; n += 1
    (total / n).backward()
    print("tokens above the bound", over, "of", n, "grad diff", (grad - model.out.weight.grad).abs().max().item(), grad.norm().item())
    assert torch.allclose(grad, model.out.weight.grad, atol=1e-5) and over > 0
