"""GSPO-token (Zheng et al. 2025, arXiv 2507.18071, section 4.3; verl, TRL, NeMo-RL). The ratio of each token is sg[s]*pi/sg[pi]: its value is the sequence's
geometric mean ratio s, the same for every token, while the gradient runs through the token itself. exp(x - x.detach()) looks like a constant 1 and the sequence ratio is detached."""
import torch
import torch.nn as nn

FAMILY = "policy-gradient and value losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [rows, time]",
    "loss_mask": "1 where the token was generated and is trained, [rows, time]; the first column is 0, each row has at least one 1",
    "old_logp": "log-probability of token ids[:, t] under the sampling policy at entry t, [rows, time], constant",
    "advantages": "one advantage per row, [rows], constant",
}
SETTINGS = {"clip_low": "sequence ratio not below 1 - 3e-2", "clip_high": "sequence ratio not above 1 + 4e-2"}
NOTES = (
    "GSPO in its token form. s_i = exp(mean over the trained tokens of row i of logp - old_logp) is the length-normalised sequence ratio. Every token of the row has the value s_i as its ratio, with the gradient of "
    "its own log-probability: ratio_it = stopgrad(s_i)*exp(logp_it - stopgrad(logp_it)). Token loss max(-A_i*ratio, -A_i*clip(ratio, 1-clip_low, 1+clip_high)); so a row is clipped as a whole or not at all. "
    "Mean over the trained tokens of each row, then mean over the rows (each row has the same weight). Token t is predicted from position t-1. old_logp and advantages are constants. "
    "With equal advantages inside a row value and gradient equal those of sequence-level GSPO. All parameters are used; any number of rows."
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
        mask[r, 4:int(torch.randint(7, 15, (1,), generator=g))] = 1
    with torch.no_grad():
        old = _logp(model, ids) + 0.1 * torch.randn(6, 14, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logp": old * mask, "advantages": torch.randn(6, generator=g)}


def right(model, batch, clip_low=3e-2, clip_high=4e-2):
    m, a = batch["loss_mask"], batch["advantages"][:, None]
    logp = _logp(model, batch["ids"])
    n = m.sum(1).clamp(min=1)
    log_s = ((logp - batch["old_logp"]) * m).sum(1) / n
    ratio = torch.exp(log_s.detach()[:, None] + logp - logp.detach())
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_low, 1 + clip_high))
    return ((loss * m).sum(1) / n).mean()


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        right(model, d).backward()
        got = torch.cat([p.grad.flatten() for p in model.parameters()])
        val = right(model, d).item()
        model.zero_grad()
        total = 0.0
        for r in range(6):
            lp = _logp(model, d["ids"][r:r + 1])[0]
            on = d["loss_mask"][r] > 0
            s = (lp[on] - d["old_logp"][r][on]).mean().exp()
            A = d["advantages"][r]
            total = total - torch.minimum(s * A, s.clamp(0.97, 1.04) * A) / 6
        total.backward()
        want = torch.cat([p.grad.flatten() for p in model.parameters()])
        print("seed", seed, "loss %.6f explicit %.6f |grad| %.5f difference %.1e" % (val, total.item(), got.norm(), (got - want).norm()))
        assert abs(val - total.item()) < 1e-5 and torch.allclose(got, want, atol=1e-6) and got.norm() > 0
