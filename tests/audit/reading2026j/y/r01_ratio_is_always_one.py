"""On-policy GRPO loss whose ratio is always exactly 1. The old log-probabilities are the current ones, detached, so the
loss VALUE does not depend on the parameters (it is minus the token-weighted mean advantage), yet its gradient is the
REINFORCE gradient. TRL's GRPOTrainer does this whenever num_iterations == 1 (old_per_token_logps is None)."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0",
          "completion_mask": "1 where the token was sampled by the policy, [rows, time], aligned with ids",
          "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"clip": "PPO clip, 0.2 (never active here because the ratio is 1)"}
NOTES = ("Policy-gradient (PPO/GRPO family), exactly one update per rollout, hence no stored old log-probabilities. "
         "Reduction: sum over completion tokens of all rows divided by the number of these tokens (DAPO style). "
         "The value of the loss is independent of the parameters by design; only its gradient is meaningful. "
         "advantages are constants. All parameters are used. Any number of rows.")

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
    return {"model": TinyLM(), "ids": ids, "completion_mask": mask, "advantages": torch.randn(6, generator=g)}


def right(model, batch, clip=0.2):
    logp = token_logps(model(batch["ids"]), batch["ids"])
    mask = batch["completion_mask"][:, 1:]
    ratio = torch.exp(logp - logp.detach())
    adv = batch["advantages"].unsqueeze(1)
    per_token = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    loss = (per_token * mask).sum() / mask.sum()
    return loss, {"ratio_mean": ((ratio * mask).sum() / mask.sum()).item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    reinforce, tokens, value = 0.0, 0, 0.0
    for i in range(6):
        for t in range(1, 10):
            if d["completion_mask"][i, t] == 1:
                lp = model(d["ids"][i:i + 1, :t])[0, -1].log_softmax(-1)[d["ids"][i, t]]
                reinforce, tokens = reinforce - d["advantages"][i] * lp, tokens + 1
                value -= d["advantages"][i].item()
    g1, g2 = grads(loss, model), grads(reinforce / tokens, model)
    print("loss", loss.item(), "minus mean advantage", value / tokens, metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equals REINFORCE", close(g1, g2))
    assert abs(loss.item() - value / tokens) < 1e-6 and close(g1, g2)
