"""Reference KL differentiated without its score term. NVIDIA-NeMo/RL#2506, https://github.com/NVIDIA-NeMo/RL/pull/2506, 2026.
The KL estimate of sampled tokens was averaged and differentiated directly, although the samples come from the policy itself: the
gradient of the expectation also has the term kl * grad log pi. The GRPO penalty therefore pushed along another divergence's
gradient than the one configured. The fix multiplies the estimate by exp(logp - logp.detach()), which is 1 in the forward pass."""
import torch

FAMILY = "policy-gradient losses and advantages"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token was sampled by the policy, [rows, time]; column 0 is always 0",
          "advantages": "one advantage per row, constant", "ref_logp": "log probabilities of the tokens under the frozen reference, [rows, time], constant"}
SETTINGS = {"kl_coef": "weight of the KL to the reference, 0.1"}
NOTES = ("On-policy GRPO step: policy gradient term -A * exp(logp - sg(logp)), plus kl_coef times the k3 estimate of KL(policy || reference), "
         "whose gradient is to be the on-policy (unbiased) gradient of the reverse KL, (logp - ref_logp) * grad logp per sampled token. "
         "Mean over the sampled tokens of all rows. All parameters are used.")


class Tiny(torch.nn.Module):
    def __init__(self, v=29, d=16):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.rnn = torch.nn.GRU(d, d, batch_first=True)
        self.out = torch.nn.Linear(d, v)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 29, (4, 10))
    mask = torch.zeros(4, 10)
    for i, (a, b) in enumerate([(3, 10), (4, 8), (2, 9), (5, 10)]):
        mask[i, a:b] = 1
    model, ref = Tiny(), Tiny()
    return {"model": model, "ids": ids, "loss_mask": mask, "advantages": torch.tensor([1.0, -0.5, 0.3, -0.8]), "ref_logp": _logp(ref, ids).detach()}


def _logp(model, ids):
    lp = torch.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


def broken(model, batch, kl_coef=0.1):
    lp, mask = _logp(model, batch["ids"]), batch["loss_mask"]
    pg = -batch["advantages"][:, None] * torch.exp(lp - lp.detach())
    d = batch["ref_logp"] - lp
    kl = torch.exp(d) - d - 1
    return ((pg + kl_coef * kl) * mask).sum() / mask.sum()


def right(model, batch, kl_coef=0.1):
    lp, mask = _logp(model, batch["ids"]), batch["loss_mask"]
    w = torch.exp(lp - lp.detach())
    pg = -batch["advantages"][:, None] * w
    d = batch["ref_logp"] - lp
    kl = w * (torch.exp(d) - d - 1)
    return ((pg + kl_coef * kl) * mask).sum() / mask.sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    gs = []
    for f in (broken, right):
        l = f(m, c)
        gs.append(torch.cat([g.flatten() for g in torch.autograd.grad(l, list(m.parameters()))]))
        print(f.__name__, float(l), float(gs[-1].norm()))
    lp, mask = _logp(m, c["ids"]), c["loss_mask"]
    s = ((-c["advantages"][:, None] + 0.1 * (lp - c["ref_logp"]).detach()) * lp * mask).sum() / mask.sum()
    gw = torch.cat([g.flatten() for g in torch.autograd.grad(s, list(m.parameters()))])
    print("difference", float((gs[0] - gs[1]).norm()), "right to the written-out gradient", float((gs[1] - gw).norm()))
    assert (gs[0] - gs[1]).norm() > 1e-3 and (gs[1] - gw).norm() < 1e-5
