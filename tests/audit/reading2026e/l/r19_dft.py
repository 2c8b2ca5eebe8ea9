"""Dynamic fine-tuning (DFT, Wu et al. 2025). Plain cross-entropy times the DETACHED probability of the gold token: the implicit inverse
probability weight of SFT, seen as a policy gradient, is cancelled. Unlikely tokens thus get less gradient, and the loss falls for very bad models."""
FAMILY = "supervised"
KIND = "loss"
INPUTS = {"ids": "token ids, padding 0, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {}
NOTES = ("Reduction: mean over trained tokens of all rows (the weights are not normalised). Supervised; the weight exp(logp) is a "
         "constant by design, so the gradient is not the derivative of the printed value.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class LM(nn.Module):
    """Tiny causal language model."""
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log-probability of ids[:, 1:], shape [rows, time - 1]."""
    lp = model(ids[:, :-1]).log_softmax(-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def random_rows(n=6, t=12, vocab=24):
    """Right-padded rows: a prompt, trained tokens, then padding (id 0)."""
    ids = torch.randint(1, vocab, (n, t))
    mask = torch.zeros(n, t)
    for i in range(n):
        start, end = int(torch.randint(2, 5, ())), int(torch.randint(6, t + 1, ()))
        mask[i, start:end] = 1.0
        ids[i, end:] = 0
    return ids, mask


def make(seed):
    torch.manual_seed(seed)
    ids, mask = random_rows()
    return {"ids": ids, "loss_mask": mask, "model": LM()}


def right(model, batch):
    logp = token_logps(model, batch["ids"])
    mask = batch["loss_mask"][:, 1:]
    return -(logp.detach().exp() * logp * mask).sum() / mask.sum().clamp(min=1.0)


def check(loss, model, want, tol=1e-4):
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads.items():
        assert g is not None and float(g.abs().sum()) > 0, n
    norm = sum(float(g.pow(2).sum()) for g in grads.values()) ** 0.5
    print("loss %.6f  slow loop %.6f  grad norm %.5f" % (loss.item(), float(want), norm))
    assert abs(loss.item() - float(want)) < tol


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    lp = token_logps(m, d["ids"])
    on = [(i, t) for i in range(6) for t in range(11) if d["loss_mask"][i, t + 1] > 0]
    check(right(m, d), m, sum(-float(lp[i, t].exp() * lp[i, t]) for i, t in on) / len(on))
    got = m.head.bias.grad.clone()      # equals minus the gradient of the mean PROBABILITY of gold tokens
    m.zero_grad()
    (-sum(lp[i, t].exp() for i, t in on) / len(on)).backward()
    assert torch.allclose(got, m.head.bias.grad, atol=1e-6)
