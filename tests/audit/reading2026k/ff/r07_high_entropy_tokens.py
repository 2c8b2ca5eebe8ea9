"""Only the 20-percent tokens of highest entropy are trained, but the mean is over all tokens. Beyond the 80/20 Rule (Wang et al., 2025,
arXiv:2506.01939), TRL `top_entropy_quantile`: the threshold is a quantile over all response tokens of the batch, tokens below it get a
zero loss, and the denominator stays the number of all response tokens (as in the paper's objective). Most trained-mask positions have no
gradient, and one row's entropies decide on another row's tokens."""
import torch

FAMILY = "policy-gradient losses and advantages"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on response tokens, [rows, time]; column 0 is 0", "old_logp": "log probability of each token when it was sampled, [rows, time], constant",
          "advantages": "advantage per row, [rows], constant"}
SETTINGS = {"clip": "PPO clip, 0.2", "top": "part of the response tokens that is trained, 0.2"}
NOTES = ("Clipped policy loss, summed over the response tokens whose entropy is at least the (1 - top) quantile of the entropies of all response tokens of the batch, divided by the number of ALL response tokens. "
         "Entropies and threshold are constants for the gradient. Rows depend on each other through the threshold. All parameters are used.")


class Tiny(torch.nn.Module):
    def __init__(self, v=29, d=16):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.rnn = torch.nn.GRU(d, d, batch_first=True)
        self.out = torch.nn.Linear(d, v)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def _logp_entropy(model, ids):
    full = torch.log_softmax(model(ids[:, :-1]), -1)
    lp = full.gather(-1, ids[:, 1:, None])[..., 0]
    ent = -(full.exp() * full).sum(-1).detach()
    zero = torch.zeros_like(lp[:, :1])
    return torch.cat([zero, lp], 1), torch.cat([zero.detach(), ent], 1)


def make(seed):
    torch.manual_seed(seed)
    model, ids = Tiny(), torch.randint(0, 29, (4, 12))
    mask = torch.zeros(4, 12)
    for i, (a, b) in enumerate([(3, 12), (4, 8), (2, 11), (5, 12)]):
        mask[i, a:b] = 1
    old = _logp_entropy(model, ids)[0].detach() + 0.1 * torch.randn(4, 12)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logp": old, "advantages": torch.tensor([1.0, -0.7, 0.4, -1.1])}


def right(model, batch, clip=0.2, top=0.2):
    mask, adv = batch["loss_mask"], batch["advantages"][:, None]
    lp, ent = _logp_entropy(model, batch["ids"])
    keep = (ent >= torch.quantile(ent[mask.bool()], 1 - top)).float() * mask
    r = torch.exp(lp - batch["old_logp"])
    per_token = -torch.min(r * adv, r.clamp(1 - clip, 1 + clip) * adv)
    return (per_token * keep).sum() / mask.sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(m.parameters()))])
    lp, ent = _logp_entropy(m, c["ids"])
    where = [(i, t) for i in range(4) for t in range(12) if c["loss_mask"][i, t]]
    ranked = sorted((float(ent[i, t]) for i, t in where))
    pos = 0.8 * (len(ranked) - 1)
    cut = ranked[int(pos)] + (pos - int(pos)) * (ranked[int(pos) + 1] - ranked[int(pos)])
    want, n = 0.0, 0
    for i, t in where:
        if float(ent[i, t]) >= cut - 1e-7:
            r, a = torch.exp(lp[i, t] - c["old_logp"][i, t]), float(c["advantages"][i])
            want, n = want - torch.min(r * a, r.clamp(0.8, 1.2) * a), n + 1
    want = want / len(where)
    gw = torch.cat([g.flatten() for g in torch.autograd.grad(want, list(m.parameters()))])
    print(loss.item(), want.item(), "trained", n, "of", len(where))
    assert abs(loss.item() - want.item()) < 1e-6 and (grad - gw).norm() < 1e-6 < grad.norm() and n < len(where) / 3
