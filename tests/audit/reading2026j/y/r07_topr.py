"""Tapered off-policy REINFORCE: good samples are weighted 1 (no importance weight at all, although the data are off-policy), bad samples by the WHOLE-sequence ratio
truncated to [0, 1] and detached. No clip, no baseline, the log-probability is summed over the row, not averaged. Le Roux et al. 2025 (TOPR)."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0",
          "labels": "ids where the token was sampled, -100 elsewhere (prompt, padding), [rows, time], aligned with ids (shift happens inside)",
          "behaviour_logp": "log-probability of the whole completion under the policy that sampled it (sum over tokens), [rows], constant",
          "reward": "+1 for a correct completion, -1 for a wrong one, [rows], constant"}
SETTINGS = {"taper_max": "truncation of the importance weight of wrong rows, 1.0"}
NOTES = ("Off-policy REINFORCE. Reduction: SUM over the tokens of a row, mean over rows. Correct and wrong rows are treated differently on purpose: weight 1 against min(ratio, 1). "
         "The weight is detached. A batch with only correct rows is plain maximum likelihood. behaviour_logp and reward are constants. All parameters are used. Any number of rows.")

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

def _seq_logp(model, ids, labels):
    target = labels[:, 1:]
    logp = -nn.functional.cross_entropy(model(ids)[:, :-1].transpose(1, 2), target, reduction="none", ignore_index=-100)
    return logp.sum(1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_rows(g, 8, 10, 32)
    labels = torch.where(mask.bool(), ids, torch.full_like(ids, -100))
    model = TinyLM()
    with torch.no_grad():
        behaviour = (_seq_logp(model, ids, labels) + 1.0 * torch.randn(8, generator=g)).clamp(max=-0.05)
    reward = torch.tensor([1.0, -1.0])[torch.randint(0, 2, (8,), generator=g)]
    reward[0], reward[1] = 1.0, -1.0
    return {"model": model, "ids": ids, "labels": labels, "behaviour_logp": behaviour, "reward": reward}


def right(model, batch, taper_max=1.0):
    logp = _seq_logp(model, batch["ids"], batch["labels"])
    taper = (logp.detach() - batch["behaviour_logp"]).exp().clamp(0.0, taper_max)
    weight = torch.where(batch["reward"] > 0, torch.ones_like(taper), taper)
    return -(weight * batch["reward"] * logp).mean()


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, total = right(model, d), 0.0
    for i in range(8):
        lp = sum(model(d["ids"][i:i + 1, :t])[0, -1].log_softmax(-1)[d["ids"][i, t]] for t in range(1, 10) if d["labels"][i, t] != -100)
        if d["reward"][i] > 0:
            total = total - lp
        else:
            w = min(1.0, float(torch.exp(lp.detach() - d["behaviour_logp"][i])))
            print("wrong row", i, "weight", round(w, 3))
            total = total + w * lp
    g1, g2 = grads(loss, model), grads(total / 8, model)
    print("loss", loss.item(), "explicit", (total / 8).item())
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - (total / 8).item()) < 1e-5 and close(g1, g2)
