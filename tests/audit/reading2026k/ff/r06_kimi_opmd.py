"""Kimi k1.5 policy mirror descent: no ratio, no clip, no length normalization, a square of log ratios. Kimi k1.5 (2025,
arXiv:2501.12599, section 2.3), Trinity-RFT `opmd`: off-policy samples are used with plain log probabilities of the current policy and
without importance weights; instead (tau / 2) * (log pi / pi_old)^2 of the whole sequence is added. The baseline is the plain group mean
and rows of a group with equal rewards still get a gradient from the square."""
import torch

FAMILY = "policy-gradient losses and advantages"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens, [rows, time]; column 0 is 0", "old_logp": "log probability of each token when it was sampled, [rows, time], constant",
          "rewards": "reward per row, [rows], constant", "groups": "prompt number per row, [rows]; the group's mean reward is the baseline"}
SETTINGS = {"tau": "weight of the squared log ratio, 0.2"}
NOTES = ("Per row: -(reward - group mean) * sum of logp over its response tokens + tau / 2 * (sum of logp - sum of old_logp over its response tokens)^2. Mean over rows, no division by the length. "
         "Rows of a group must be in the same batch. All parameters are used.")


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
    model, ids = Tiny(), torch.randint(0, 29, (6, 10))
    mask = torch.zeros(6, 10)
    for i, (a, b) in enumerate([(3, 10), (3, 7), (3, 9), (5, 10), (5, 8), (5, 9)]):
        mask[i, a:b] = 1
    old = _logp(model, ids).detach() + 0.1 * torch.randn(6, 10)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logp": old, "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 0.0]), "groups": torch.tensor([0, 0, 0, 1, 1, 1])}


def right(model, batch, tau=0.2):
    mask, g = batch["loss_mask"], batch["groups"]
    lp = (_logp(model, batch["ids"]) * mask).sum(1)
    old = (batch["old_logp"] * mask).sum(1)
    same = (g[:, None] == g[None, :]).float()
    base = same @ batch["rewards"] / same.sum(1)
    return (-(batch["rewards"] - base) * lp + 0.5 * tau * (lp - old) ** 2).mean()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(m.parameters()))])
    lp, want, score = _logp(m, c["ids"]), 0.0, 0.0
    for i in range(6):
        seq = sum(lp[i, t] for t in range(10) if c["loss_mask"][i, t])
        old = sum(float(c["old_logp"][i, t]) for t in range(10) if c["loss_mask"][i, t])
        group = [float(r) for r, h in zip(c["rewards"], c["groups"]) if h == c["groups"][i]]
        a = float(c["rewards"][i]) - sum(group) / len(group)
        want += (-a * float(seq.detach()) + 0.1 * (float(seq.detach()) - old) ** 2) / 6
        score = score + (-a + 0.2 * (float(seq.detach()) - old)) * seq / 6
    gw = torch.cat([g.flatten() for g in torch.autograd.grad(score, list(m.parameters()))])
    print(loss.item(), want, "gradient", grad.norm().item(), "diff", (grad - gw).norm().item())
    assert abs(loss.item() - want) < 1e-4 and (grad - gw).norm() < 1e-4 < grad.norm()
