"""KTO: unpaired rows, and a baseline z0 that is the mean log-ratio of deliberately MISMATCHED prompt/answer rows, clamped at 0 and without gradient. The mismatched rows run through the model under no_grad and
never train it. Ethayarajh et al. 2024; TRL KTOTrainer. The loss is 1 - sigmoid(...), not a log-sigmoid."""
import torch
from torch import nn

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0", "completion_mask": "1 on answer tokens, [rows, time]",
          "desirable": "True if the answer is good, [rows], bool",
          "ref_logps": "log-probability of the answer under the frozen reference (sum), [rows], constant",
          "kl_ids": "prompt of row i with the answer of row i+1 (cyclically), [rows, time]; made by the data stage",
          "kl_mask": "1 on the answer tokens of kl_ids, [rows, time]",
          "ref_kl_logps": "log-probability of the mismatched answer under the reference, [rows], constant"}
SETTINGS = {"beta": "strength, 0.1", "weight_good": "weight of desirable rows, 1.0", "weight_bad": "weight of undesirable rows, 1.33"}
NOTES = ("Preference loss on unpaired rows (KTO). Reduction: log-probabilities summed over answer tokens; mean over all rows of weight * loss (not divided by the weights). The baseline is one number for the whole batch, detached and >= 0, so the loss of a batch is not "
         "the average of the losses of its parts. kl_* inputs carry no gradient by design. A batch with only good or only bad rows is legal. ref_* are constants. All parameters are used. At least 2 rows.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def token_logps(logits, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 ... time-1."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

def _sum_logp(model, ids, mask):
    return (token_logps(model(ids), ids) * mask[:, 1:]).sum(1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, time = 6, 10
    prompts = [torch.randint(1, 32, (int(torch.randint(2, 5, (1,), generator=g)),), generator=g) for _ in range(rows)]
    answers = [torch.randint(1, 32, (int(torch.randint(2, 6, (1,), generator=g)),), generator=g) for _ in range(rows)]

    def lay(pairs):
        ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
        for i, (p, a) in enumerate(pairs):
            ids[i, :len(p) + len(a)] = torch.cat([p, a])
            mask[i, len(p):len(p) + len(a)] = 1.0
        return ids, mask

    ids, mask = lay(list(zip(prompts, answers)))
    kl_ids, kl_mask = lay([(prompts[i], answers[(i + 1) % rows]) for i in range(rows)])
    model = TinyLM()
    with torch.no_grad():
        ref = _sum_logp(model, ids, mask) + torch.randn(rows, generator=g)
        ref_kl = _sum_logp(model, kl_ids, kl_mask) + torch.randn(rows, generator=g) - 0.8
    return {"model": model, "ids": ids, "completion_mask": mask, "desirable": torch.tensor([True, False, True, True, False, False]), "ref_logps": ref,
            "kl_ids": kl_ids, "kl_mask": kl_mask, "ref_kl_logps": ref_kl}


def right(model, batch, beta=0.1, weight_good=1.0, weight_bad=1.33):
    with torch.no_grad():
        z0 = (_sum_logp(model, batch["kl_ids"], batch["kl_mask"]) - batch["ref_kl_logps"]).mean().clamp(min=0)
    ratio = _sum_logp(model, batch["ids"], batch["completion_mask"]) - batch["ref_logps"]
    good = weight_good * (1 - torch.sigmoid(beta * (ratio - z0)))
    bad = weight_bad * (1 - torch.sigmoid(beta * (z0 - ratio)))
    return torch.where(batch["desirable"], good, bad).mean(), {"kl": z0.item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    slow = lambda ids, mask, i: sum(model(ids[i:i + 1, :t])[0, -1].log_softmax(-1)[ids[i, t]] for t in range(1, 10) if mask[i, t] == 1)
    z0 = max(0.0, sum(slow(d["kl_ids"], d["kl_mask"], i).item() - d["ref_kl_logps"][i].item() for i in range(6)) / 6)
    total, surrogate = 0.0, 0.0
    for i in range(6):
        lp = slow(d["ids"], d["completion_mask"], i)
        sign, w = (1, 1.0) if d["desirable"][i] else (-1, 1.33)
        s = 1 / (1 + math.exp(-0.1 * sign * (lp.item() - d["ref_logps"][i].item() - z0)))
        total += w * (1 - s) / 6
        surrogate = surrogate - w * s * (1 - s) * 0.1 * sign * lp / 6
    g1, g2 = grads(loss, model), grads(surrogate, model)
    print("loss", loss.item(), "explicit", total, "z0", z0, metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equals analytic", close(g1, g2))
    assert abs(loss.item() - total) < 1e-5 and close(g1, g2) and z0 > 0
