"""GSPO-token: sg[sequence ratio] * pi / sg[pi]. Group Sequence Policy Optimization (Zheng et al., 2025, arXiv:2507.18071, section
4.3), verl `gspo`, TRL importance_sampling_level="sequence_token". The value is the sequence ratio at every token, the gradient is
that of the token; both a detached and a differentiable copy of the same log probability occur, the clip range is 3e-4, and
advantages may differ between the tokens of a row."""
import torch

FAMILY = "policy-gradient losses and advantages"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens, [rows, time]; column 0 is 0", "old_logp": "log probability of each token when it was sampled, [rows, time], constant",
          "advantages": "advantage per token, [rows, time], constant"}
SETTINGS = {"clip_low": "lower clip, 3e-4", "clip_high": "upper clip, 4e-4"}
NOTES = ("-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) per response token with s = sg[s_i] * pi_t / sg[pi_t], s_i = exp(mean over the row's response tokens of logp - old_logp). "
         "Mean over the tokens of a row, then mean over rows; each row has at least one response token. s_i is a constant for the gradient. All parameters are used.")


class Tiny(torch.nn.Module):
    def __init__(self, v=29, d=16):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.rnn = torch.nn.GRU(d, d, batch_first=True)
        self.out = torch.nn.Linear(d, v)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def _logp(model, ids):
    lp = torch.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


def make(seed):
    torch.manual_seed(seed)
    model, ids = Tiny(), torch.randint(0, 29, (5, 11))
    mask = torch.zeros(5, 11)
    for i, (a, b) in enumerate([(3, 11), (4, 8), (2, 9), (5, 11), (4, 10)]):
        mask[i, a:b] = 1
    old = _logp(model, ids).detach() + 1e-3 * torch.randn(5, 11) * mask
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logp": old, "advantages": torch.randn(5, 1) + 0.2 * torch.randn(5, 11)}


def right(model, batch, clip_low=3e-4, clip_high=4e-4):
    lp, mask, adv = _logp(model, batch["ids"]), batch["loss_mask"], batch["advantages"]
    n = mask.sum(1)
    seq = torch.exp(((lp.detach() - batch["old_logp"]) * mask).sum(1) / n)
    s = seq[:, None] * torch.exp(lp - lp.detach())
    per_token = -torch.min(s * adv, s.clamp(1 - clip_low, 1 + clip_high) * adv)
    return ((per_token * mask).sum(1) / n).mean()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(m.parameters()))])
    lp = _logp(m, c["ids"])
    want, value, active = 0.0, 0.0, 0
    for i in range(5):
        ts = [t for t in range(11) if c["loss_mask"][i, t]]
        s = float(torch.exp(sum(lp[i, t].detach() - c["old_logp"][i, t] for t in ts) / len(ts)))
        for t in ts:
            a = float(c["advantages"][i, t])
            clipped = (a > 0 and s > 1 + 4e-4) or (a < 0 and s < 1 - 3e-4)
            value += -min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a) / len(ts) / 5
            if not clipped:
                active += 1
                want = want - s * a * lp[i, t] / len(ts) / 5
    gw = torch.cat([g.flatten() for g in torch.autograd.grad(want, list(m.parameters()))])
    print(loss.item(), value, "tokens with gradient", active, "of", int(c["loss_mask"].sum()), "diff", (grad - gw).norm().item())
    assert abs(loss.item() - value) < 1e-5 and (grad - gw).norm() < 1e-5 < grad.norm() and 0 < active < c["loss_mask"].sum()
