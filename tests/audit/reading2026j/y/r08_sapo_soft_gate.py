"""SAPO: the ratio goes through sigmoid(tau * (ratio - 1)) * 4 / tau instead of a clip, with a DIFFERENT temperature for negative advantages. At ratio 1 the surrogate is
2 / tau times the advantage (not 1 times), yet its slope is exactly 1, so on-policy the gradient is the policy gradient. Gao et al. 2025 (arXiv 2511.20347); TRL loss_type="sapo"."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0",
          "completion_mask": "1 where the token was sampled by the policy, [rows, time], aligned with ids",
          "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time-1], constant",
          "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"tau_pos": "temperature of the gate for positive advantages, 1.0", "tau_neg": "temperature of the gate for negative advantages, 1.05"}
NOTES = ("Policy-gradient with a smooth gate in place of the PPO clip; there is no clip and no min. Reduction: mean over completion tokens of a row, then mean over rows. "
         "The value of the loss at ratio 1 is -mean(2 * A / tau), which need not be 0 even with centred advantages. old_logps and advantages are constants. All parameters are used. Any number of rows.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_rows(g, rows, time, vocab):
    """Right-padded rows; mask is 1 on the completion (never on position 0, which nothing predicts)."""
    ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
    for i in range(rows):
        prompt = int(torch.randint(2, 4, (1,), generator=g))
        end = int(torch.randint(prompt + 2, time + 1, (1,), generator=g))
        ids[i, :end] = torch.randint(1, vocab, (end,), generator=g)
        mask[i, prompt:end] = 1.0
    return ids, mask

def token_logps(logits, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 ... time-1."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_rows(g, 6, 10, 32)
    model = TinyLM()
    with torch.no_grad():
        old = token_logps(model(ids), ids) + 0.5 * torch.randn(6, 9, generator=g)
    return {"model": model, "ids": ids, "completion_mask": mask, "old_logps": old, "advantages": torch.randn(6, generator=g)}


def right(model, batch, tau_pos=1.0, tau_neg=1.05):
    ids, mask = batch["ids"], batch["completion_mask"][:, 1:]
    adv = batch["advantages"].unsqueeze(1)
    ratio = torch.exp(token_logps(model(ids), ids) - batch["old_logps"])
    tau = torch.where(adv > 0, torch.full_like(adv, tau_pos), torch.full_like(adv, tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -(((gate * adv) * mask).sum(1) / mask.sum(1)).mean()


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    loss, total, expected = right(model, d), 0.0, 0.0
    for i in range(6):
        a, row, lps = float(d["advantages"][i]), [], []
        for t in range(1, 10):
            if d["completion_mask"][i, t] == 1:
                lp = model(d["ids"][i:i + 1, :t])[0, -1].log_softmax(-1)[d["ids"][i, t]]
                r, tau = float(torch.exp(lp.detach() - d["old_logps"][i, t - 1])), 1.0 if a > 0 else 1.05
                s = 1 / (1 + math.exp(-tau * (r - 1)))
                row.append(-s * 4 / tau * a)
                lps.append(-4 * s * (1 - s) * r * a * lp)          # the paper's weighted log-probability gradient
        total, expected = total + sum(row) / len(row) / 6, expected + sum(lps) / len(lps) / 6
    g1, g2 = grads(loss, model), grads(expected, model)
    print("loss", loss.item(), "explicit", total, "gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    with torch.no_grad():
        d["old_logps"] = token_logps(model(d["ids"]), d["ids"])
    m = d["completion_mask"][:, 1:]
    pg = -((token_logps(model(d["ids"]), d["ids"]) * d["advantages"][:, None] * m).sum(1) / m.sum(1)).mean()
    print("on-policy equals the policy gradient:", close(grads(right(model, d), model), grads(pg, model)))
    assert abs(loss.item() - total) < 1e-5 and close(g1, g2)
