"""Group policy loss with the unbiased KL penalty of DeepSeek-V3.2. The k3 estimate is multiplied by the live ratio pi/pi_old, WITH gradient,
so its gradient is that of the reverse KL; negative-advantage rows that drifted far from the sampler are masked out but stay in the divisor."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {
    "ids": "token ids, prompt, completion, padding 0, [rows, time]", "loss_mask": "1 on completion tokens, [rows, time]",
    "old_logps": "sampler's log-probabilities of ids[:, 1:], [rows, time - 1]",
    "ref_logps": "reference model's log-probabilities of ids[:, 1:], [rows, time - 1]", "advantages": "one per row, [rows]"}
SETTINGS = {"clip": "PPO clip, 0.2", "beta": "weight of the KL, 0.05", "drift": "rows with negative advantage and mean(old - new) above this are masked, 0.1"}
NOTES = ("Reduction: mean over all trained tokens of all rows; masked rows keep their KL term and their place in the divisor. Policy gradient; "
         "old_logps, ref_logps, advantages and the row mask are constants. The ratio in the KL term is not clipped and has gradient.")
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
        base = token_logps(model, ids)
    return {"ids": ids, "loss_mask": mask, "old_logps": base + 0.3 * torch.randn_like(base), "ref_logps": base + 0.3 * torch.randn_like(base),
            "advantages": torch.randn(8), "model": model}


def right(model, batch, clip=0.2, beta=0.05, drift=0.1):
    mask = batch["loss_mask"][:, 1:]
    n = mask.sum(1).clamp(min=1.0)
    logp = token_logps(model, batch["ids"])
    adv = batch["advantages"][:, None]
    ratio = ((logp - batch["old_logps"]) * mask).exp()
    far = ((batch["old_logps"] - logp.detach()) * mask).sum(1) / n > drift
    keep = (~(far & (batch["advantages"] < 0))).float()[:, None]
    surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    gap = (batch["ref_logps"] - logp) * mask
    k3 = gap.exp() - gap - 1.0
    per_token = -surrogate * keep + beta * ratio * k3
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
    import math
    d = make(0)
    m = d.pop("model")
    lp = token_logps(m, d["ids"]).detach()
    tot, n, dropped = 0.0, 0, 0
    for i in range(8):
        on = [t for t in range(11) if d["loss_mask"][i, t + 1] > 0]
        A = float(d["advantages"][i])
        out = A < 0 and sum(float(d["old_logps"][i, t] - lp[i, t]) for t in on) / len(on) > 0.1
        dropped += out
        for t in on:
            r = math.exp(float(lp[i, t] - d["old_logps"][i, t]))
            g = float(d["ref_logps"][i, t] - lp[i, t])
            if not out:
                tot -= min(r * A, min(max(r, 0.8), 1.2) * A)
            tot += 0.05 * r * (math.exp(g) - g - 1)
            n += 1
    print("rows masked:", dropped)
    check(right(m, d), m, tot / n)
