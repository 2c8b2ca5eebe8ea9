"""Decoupled PPO (Hilton et al. 2021; AReaL, arXiv:2505.24298): the clip is centred at a proximal policy (weights at the start of the step), not at the policy that sampled, and a second, detached weight proximal/behaviour corrects
for the stale samples. Two ratios multiply; tokens with an extreme weight are left out but stay in the denominator."""
import torch
import torch.nn as nn

FAMILY = "replay and off-policy corrections"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
    "behaviour_logps": "log-prob of each token under the policy that sampled it (may be several versions old), [rows, time], constant; entry t belongs to token t, entry 0 unused",
    "proximal_logps": "log-prob of each token under the weights at the start of this training step, [rows, time], constant, same alignment",
    "advantages": "one advantage per token, [rows, time], constant",
}
SETTINGS = {"clip": "PPO clip around the proximal policy, 0.2", "cap": "largest weight proximal/behaviour that is trained, 2.0"}
NOTES = ("Decoupled PPO. ratio = exp(logp - proximal_logp); token loss = -min(ratio * A, clip(ratio, 1-clip, 1+clip) * A), multiplied by w = exp(proximal_logp - behaviour_logp), a constant. "
         "A token with w > cap is left out (loss 0); there is no lower bound. Loss = sum over trained tokens / number of ones in loss_mask: tokens left out by the cap stay in the denominator. "
         "The log-prob of token t is read from the logits at t-1. All parameters are used.")

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
        prox = token_logps(model, ids) + 0.15 * torch.randn(4, 9, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "proximal_logps": prox,
            "behaviour_logps": prox + 0.5 * torch.randn(4, 9, generator=g), "advantages": torch.randn(4, 9, generator=g)}


def right(model, batch, clip=0.2, cap=2.0):
    logp, m = token_logps(model, batch["ids"])[:, 1:], batch["loss_mask"][:, 1:]
    prox, A = batch["proximal_logps"][:, 1:], batch["advantages"][:, 1:]
    w = (prox - batch["behaviour_logps"][:, 1:]).exp()
    w = torch.where(w <= cap, w, torch.zeros_like(w))
    ratio = (logp - prox).exp()
    tok = -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    return (w * tok * m).sum() / m.sum().clamp(min=1)


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); loss.backward(); grad = model.out.weight.grad.clone(); model.zero_grad()
    tot, n, left = 0.0, 0, 0
    for i in range(4):
        for t in range(1, 9):
            if b["loss_mask"][i, t]:
                n += 1
                w = float((b["proximal_logps"][i, t] - b["behaviour_logps"][i, t]).exp())
                if w > 2:
                    left += 1; continue
                lp = model(b["ids"][i:i + 1, :t]).log_softmax(-1)[0, -1, b["ids"][i, t]]
                q, A = (lp - b["proximal_logps"][i, t]).exp(), b["advantages"][i, t]
                tot = tot - w * torch.minimum(q * A, q.clamp(0.8, 1.2) * A)
    (tot / n).backward()
    print(loss.item(), float((tot / n).detach()), "left out", left, "of", n)
    assert torch.allclose(loss, tot / n, atol=1e-6) and torch.allclose(grad, model.out.weight.grad, atol=1e-5) and left > 0
