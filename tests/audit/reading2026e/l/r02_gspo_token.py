"""GSPO-token (Qwen). The ratio is the geometric mean over the whole sequence, carried to each token as
sg[s_i] * pi / sg[pi]: its value is the same for all tokens of a row while its gradient is per token.
pi / sg[pi] is always 1 in value and looks like a no-op; the clip range is some 1e-3, not 0.2."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {
    "ids": "token ids, prompt, completion, padding 0, [rows, time]",
    "loss_mask": "1 where the token is a sampled completion token, [rows, time]",
    "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time - 1]",
    "advantages": "advantage of each token ids[:, 1:], may differ inside a row, [rows, time - 1]",
}
SETTINGS = {"clip_low": "lower clip of the sequence ratio, 0.003", "clip_high": "upper clip of the sequence ratio, 0.004"}
NOTES = ("Reduction: mean over the tokens of a row, then mean over rows. Policy gradient with a sequence-level ratio; "
         "old_logps and advantages are constants. Rows whose ratio is outside the clip lose their gradient as a whole.")
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
    ids, mask = random_rows(8)
    with torch.no_grad():
        old = token_logps(model, ids) + 0.004 * torch.randn(ids.shape[0], ids.shape[1] - 1)
    adv = torch.randn(len(ids), 1) + 0.2 * torch.randn(len(ids), ids.shape[1] - 1)
    return {"ids": ids, "loss_mask": mask, "old_logps": old, "advantages": adv, "model": model}


def right(model, batch, clip_low=0.003, clip_high=0.004):
    mask = batch["loss_mask"][:, 1:]
    n = mask.sum(1).clamp(min=1.0)
    logp = token_logps(model, batch["ids"])
    seq_log_ratio = ((logp - batch["old_logps"]) * mask).sum(1) / n
    log_s = seq_log_ratio.detach()[:, None] + (logp - logp.detach())
    s = log_s.exp()
    adv = batch["advantages"]
    objective = torch.minimum(s * adv, s.clamp(1 - clip_low, 1 + clip_high) * adv)
    return -((objective * mask).sum(1) / n).mean()


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
    tot = 0.0
    for i in range(len(lp)):
        ts = [t for t in range(lp.shape[1]) if d["loss_mask"][i, t + 1] > 0]
        s = float(torch.stack([lp[i, t] - d["old_logps"][i, t] for t in ts]).mean().exp())
        c = min(max(s, 1 - 0.003), 1 + 0.004)
        tot -= sum(min(s * float(d["advantages"][i, t]), c * float(d["advantages"][i, t])) for t in ts) / len(ts)
    check(right(m, d), m, tot / len(lp))
