"""CISPO (MiniMax-M1 2025; TRL, verl, prime-rl): the importance ratio is clipped from above and DETACHED, and multiplies the log-probability itself. The gradient of a clipped token does not vanish, the lower side is not clipped, and there is no min() with an unclipped term; the loss value itself has no
meaning (it is not zero on policy)."""
import torch
from torch import nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "mask": "1 on sampled tokens, [rows, time], first column 0", "old_logp": "log-probability of each token when it was sampled, [rows, time] (constant)", "advantage": "one per row, [rows] (constant)"}
SETTINGS = {"eps_high": "the ratio is clipped at 1 + eps_high, 0.5"}
NOTES = "Policy gradient; mean over sampled tokens of all rows. The weight min(ratio, 1 + eps_high) is a constant. No KL. All parameters are used. old_logp differs from the present policy by some steps."


class Tiny(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _logp(model, ids):
    lp = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], dim=1)


def make(seed):
    torch.manual_seed(seed)
    model, ids = Tiny(), torch.randint(0, 32, (4, 10))
    mask = torch.zeros(4, 10)
    for row, (a, b) in enumerate([(3, 10), (4, 7), (2, 9), (5, 10)]):
        mask[row, a:b] = 1
    old = (_logp(model, ids) + 0.6 * torch.randn(4, 10)).detach() * mask
    return {"model": model, "ids": ids, "mask": mask, "old_logp": old, "advantage": torch.tensor([1.0, -1.0, 0.5, -0.5])}


def right(model, batch, eps_high=0.5):
    logp = _logp(model, batch["ids"])
    weight = torch.exp(logp - batch["old_logp"]).clamp(max=1 + eps_high).detach()
    per_token = -weight * batch["advantage"][:, None] * logp
    return (per_token * batch["mask"]).sum() / batch["mask"].sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    got = torch.autograd.grad(loss, list(model.parameters()))
    logp, n = _logp(model, d["ids"]), d["mask"].sum()
    want, clipped = 0.0, 0
    for i in range(4):
        for t in range(10):
            if d["mask"][i, t]:
                w = min(1.5, (logp[i, t].detach() - d["old_logp"][i, t]).exp().item())
                clipped += w == 1.5
                want = want - w * d["advantage"][i] * logp[i, t] / n
    slow = torch.autograd.grad(want, list(model.parameters()))
    print("loss", loss.item(), "clipped tokens", clipped, "of", int(n), "grad", got[0].norm().item())
    assert clipped > 0 and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, slow))
