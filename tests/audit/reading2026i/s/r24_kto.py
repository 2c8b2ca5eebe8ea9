"""KTO (Ethayarajh et al. 2024, TRL): rows are single answers labelled good or bad, not pairs. The reference point is the KL estimated on MISMATCHED rows (the prompt of row i with the answer of row i+1): it comes from the current model but without gradient and clamped at 0. Good rows use 1 - sigmoid(beta*(r - z)), bad ones 1 - sigmoid(beta*(z - r)),
with different weights; the loss is no log-likelihood and is bounded."""
import torch
from torch import nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt and answer, [rows, time]", "kl_ids": "the same prompts with the answer of the next row, [rows, time]", "mask": "1 on answer tokens (all prompts and answers have the same length here), [rows, time]",
          "good": "True for a wanted answer, [rows]", "ref_logp": "reference log-probability of each answer (sum), [rows] (constant)", "ref_kl_logp": "the same for kl_ids, [rows] (constant)"}
SETTINGS = {"beta": "scale, 0.1", "good_weight": "1.0", "bad_weight": "1.5"}
NOTES = "Mean over rows of weight * (1 - sigmoid(…)). Log-probabilities are summed, not averaged, over the answer. z = max(0, mean over rows of logp - ref on kl_ids), a constant. kl_ids therefore get no gradient. Needs more than one row. All parameters are used."


class Tiny(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _logp(model, ids, mask):
    lp = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return (lp * mask[:, 1:]).sum(1)


def make(seed):
    torch.manual_seed(seed)
    model, reference = Tiny(), Tiny()
    ids = torch.randint(0, 32, (6, 10))
    mask = torch.zeros(6, 10)
    mask[:, 4:] = 1
    kl_ids = torch.cat([ids[:, :4], ids.roll(-1, 0)[:, 4:]], dim=1)
    with torch.no_grad():
        ref, ref_kl = _logp(reference, ids, mask), _logp(reference, kl_ids, mask)
    return {"model": model, "ids": ids, "kl_ids": kl_ids, "mask": mask, "good": torch.tensor([1, 0, 1, 1, 0, 0]).bool(), "ref_logp": ref, "ref_kl_logp": ref_kl}


def right(model, batch, beta=0.1, good_weight=1.0, bad_weight=1.5):
    reward = _logp(model, batch["ids"], batch["mask"]) - batch["ref_logp"]
    with torch.no_grad():
        z = (_logp(model, batch["kl_ids"], batch["mask"]) - batch["ref_kl_logp"]).mean().clamp(min=0)
    good, bad = 1 - torch.sigmoid(beta * (reward - z)), 1 - torch.sigmoid(beta * (z - reward))
    return torch.where(batch["good"], good_weight * good, bad_weight * bad).mean()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    loss.backward()
    with torch.no_grad():
        def total(ids, i):
            lp = model(ids[i:i + 1]).log_softmax(-1)
            return sum(lp[0, t - 1, ids[i, t]] for t in range(4, 10))
        z = max(0.0, sum((total(d["kl_ids"], i) - d["ref_kl_logp"][i]).item() for i in range(6)) / 6)
        v = []
        for i in range(6):
            r = (total(d["ids"], i) - d["ref_logp"][i]).item()
            s = 0.1 * (r - z) if d["good"][i] else 0.1 * (z - r)
            v.append((1.0 if d["good"][i] else 1.5) * (1 - 1 / (1 + 2.718281828459045 ** -s)))
    print("loss", loss.item(), "explicit", sum(v) / 6, "z", z, "grad", model.head.weight.grad.norm().item())
    assert abs(loss.item() - sum(v) / 6) < 1e-5 and all(p.grad.abs().sum() > 0 for p in model.parameters())
