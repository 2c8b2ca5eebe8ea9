"""CISPO (MiniMax-M1). The importance ratio is clipped from above only AND detached, and multiplies the
log-probability: no token ever loses its gradient through the clip, unlike PPO. There is no min() and no lower bound."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {
    "ids": "token ids, prompt then completion then padding 0, [rows, time]",
    "loss_mask": "1 where the token is a sampled completion token, [rows, time]",
    "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time - 1]",
    "advantages": "one advantage per row, [rows]",
}
SETTINGS = {"eps_high": "upper clip of the importance ratio, ratio at most 1 + eps_high, 0.3"}
NOTES = ("Reduction: mean over all trained tokens of all rows together. Policy gradient; the clipped ratio is a constant "
         "(detached) by design; old_logps and advantages are constants. All parameters are used; any number of rows.")
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
    model = LM()
    ids, mask = random_rows()
    with torch.no_grad():
        old = token_logps(model, ids) + 0.4 * torch.randn(ids.shape[0], ids.shape[1] - 1)
    return {"ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(len(ids)), "model": model}


def right(model, batch, eps_high=0.3):
    mask = batch["loss_mask"][:, 1:]
    logp = token_logps(model, batch["ids"])
    log_ratio = ((logp - batch["old_logps"]) * mask).detach()
    weight = log_ratio.exp().clamp(max=1.0 + eps_high)
    per_token = -weight * batch["advantages"][:, None] * logp
    return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


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
    tot, n = 0.0, 0
    for i in range(lp.shape[0]):
        for t in range(lp.shape[1]):
            if d["loss_mask"][i, t + 1] > 0:
                w = min(float((lp[i, t] - d["old_logps"][i, t]).exp()), 1.3)
                tot -= w * float(d["advantages"][i]) * float(lp[i, t])
                n += 1
    check(right(m, d), m, tot / n)
