"""Trajectory balance with the VarGrad partition function (TBA, Kimi k1.5-like). A squared error on log-probabilities rather than a
policy gradient: log Z of a prompt is the group mean of reward / beta + log ref - log pi, detached, so no learned Z exists and rows need not be on-policy."""
FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, prompt, completion, padding 0, [rows, time]", "loss_mask": "1 on completion tokens, [rows, time]",
          "ref_logps": "summed completion log-probability under the reference model, [rows]", "rewards": "reward of each row, [rows]",
          "group": "prompt number of each row, any order, [rows]"}
SETTINGS = {"beta": "KL temperature, 0.5"}
NOTES = ("Reduction: mean over rows; log-probabilities are sums over completion tokens (no length normalisation). Squared-error policy "
         "objective; ref_logps, rewards and the group's log Z are constants. A group of a single row has loss zero.")
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
        ref = (token_logps(model, ids) * mask[:, 1:]).sum(1) + torch.randn(8)
    return {"ids": ids, "loss_mask": mask, "ref_logps": ref, "rewards": torch.randint(0, 2, (8,)).float(),
            "group": torch.tensor([0, 1, 0, 2, 1, 2, 0, 1]), "model": model}


def right(model, batch, beta=0.5):
    logp = (token_logps(model, batch["ids"]) * batch["loss_mask"][:, 1:]).sum(1)
    score = batch["rewards"] / beta + batch["ref_logps"] - logp
    _, g = torch.unique(batch["group"], return_inverse=True)
    k = int(g.max()) + 1
    total = torch.zeros(k).index_add(0, g, score.detach())
    size = torch.zeros(k).index_add(0, g, torch.ones_like(logp))
    log_z = (total / size)[g]
    return (log_z - score).pow(2).mean()


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
    s = []
    for i in range(8):
        lp = token_logps(m, d["ids"][i:i + 1])[0]
        s.append(float(d["rewards"][i]) / 0.5 + float(d["ref_logps"][i]) - sum(float(lp[t]) for t in range(11) if d["loss_mask"][i, t + 1] > 0))
    tot = 0.0
    for i in range(8):
        mates = [s[j] for j in range(8) if d["group"][j] == d["group"][i]]
        tot += (s[i] - sum(mates) / len(mates)) ** 2
    check(right(m, d), m, tot / 8)
