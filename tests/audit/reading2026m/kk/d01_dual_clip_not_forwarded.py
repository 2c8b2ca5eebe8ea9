"""Dual-clip constant is parsed but never handed to the policy loss. THUDM/slime#2247,
https://github.com/THUDM/slime/pull/2247, 2026. `policy_loss_function` called `compute_policy_loss` without
`eps_clip_c`, whose default is None, so a run that asked for dual-clip PPO trained with plain clipped PPO. No error;
tokens with a negative advantage and a huge ratio kept an unbounded loss and gradient."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]",
    "loss_mask": "1 where the token was produced by the policy and is trained, [rows, time]; the first column is 0",
    "old_logp": "log-probability of each token under the policy that sampled it, [rows, time], entry t belongs to token ids[:, t], constant",
    "advantages": "advantage of each token, [rows, time], entry t belongs to token ids[:, t], constant",
}
SETTINGS = {
    "eps_clip": "lower PPO clip, ratio not below 1 - 0.2",
    "eps_clip_high": "upper PPO clip, ratio not above 1 + 0.28",
    "eps_clip_c": "dual-clip constant c, 3.0: with a negative advantage the loss of a token is at most -c * advantage; None switches it off",
}
NOTES = (
    "Dual-clip PPO (Ye et al. 2020) policy loss. The log-probability of token t comes from the logits at t-1. "
    "ratio = exp(logp - old_logp). Per token l = max(-A*ratio, -A*clip(ratio, 1-eps_clip, 1+eps_clip_high)); where A < 0 the "
    "token loss is min(l, -c*A) with c = eps_clip_c, so such a token has no gradient once its ratio exceeds c. The loss is the mean "
    "of the token losses over all trained tokens of all rows (one mean over the batch). old_logp and advantages are "
    "constants. All parameters of the model are used. Any number of rows."
)


class Tiny(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _logp(model, ids):
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(0, 23, (6, 14), generator=g)
    mask = torch.zeros(6, 14)
    for r in range(6):
        mask[r, 4:int(torch.randint(9, 15, (1,), generator=g))] = 1
    with torch.no_grad():
        old = _logp(model, ids) + 0.9 * torch.randn(6, 14, generator=g)
    adv = torch.randn(6, 1, generator=g).expand(6, 14) * torch.ones(6, 14)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logp": old * mask, "advantages": adv * mask}


def _compute_policy_loss(log_ratio, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
    ratio = log_ratio.exp()
    l1 = -ratio * advantages
    l2 = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(l1, l2)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss


def broken(model, batch, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0):
    m = batch["loss_mask"]
    log_ratio = (_logp(model, batch["ids"]) - batch["old_logp"]) * m
    loss = _compute_policy_loss(log_ratio, batch["advantages"], eps_clip, eps_clip_high)
    return (loss * m).sum() / m.sum()


def right(model, batch, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0):
    m = batch["loss_mask"]
    log_ratio = (_logp(model, batch["ids"]) - batch["old_logp"]) * m
    loss = _compute_policy_loss(log_ratio, batch["advantages"], eps_clip, eps_clip_high, eps_clip_c=eps_clip_c)
    return (loss * m).sum() / m.sum()


if __name__ == "__main__":
    for s in range(3):
        d = make(s)
        model = d.pop("model")
        out = []
        for f in (broken, right):
            model.zero_grad()
            l = f(model, d)
            l.backward()
            out.append((l.item(), sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt().item()))
            assert all(p.grad is not None for p in model.parameters())
        print("seed", s, "loss, |grad|: broken %.5f %.5f  right %.5f %.5f" % (out[0] + out[1]))
        if s == 0:
            assert abs(out[0][0] - out[1][0]) > 1e-3 and abs(out[0][1] - out[1][1]) > 1e-3
