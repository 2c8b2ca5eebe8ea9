"""Kimi k1.5 policy update as a SQUARED loss: (reward - group mean - tau * log(pi / pi_old))^2 on the whole sequence, no ratio, no clip. The reward enters inside a regression; the gradient
is (reward - mean) * grad logp - tau/2 * grad (log ratio)^2 (online policy mirror descent, Kimi k1.5 report 2025, section 2.3.2; the group mean stands for tau * log Z)."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [prompts, samples, time], right padded with 0; the samples of one prompt lie along dimension 1",
          "completion_mask": "1 where the token was sampled, [prompts, samples, time]",
          "old_seq_logp": "log-probability of the whole completion under the policy at the start of the iteration, [prompts, samples], constant",
          "rewards": "reward per sample, [prompts, samples], constant"}
SETTINGS = {"tau": "strength of the stay-close term, 0.5; also divides the loss by 2 * tau, so that the reward term of the gradient does not depend on tau"}
NOTES = ("Policy mirror descent as a regression; the value is a squared residual and never negative. Reduction: log-probabilities summed over the tokens of a sample, mean over samples and prompts, divided by 2 * tau. "
         "tau divides the loss and must not be 0. rewards and old_seq_logp are constants. The group mean needs all samples of a prompt (at least 2). All parameters are used. Any number of prompts.")

class TinyLM(nn.Module):
    """Causal by construction; right padding after a row's end cannot change earlier logits."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def random_groups(g, groups, size, time, vocab):
    """[groups, size, time]: the rows of a group share one prompt; right padded; mask is 1 on the completion."""
    ids, mask = torch.zeros(groups, size, time, dtype=torch.long), torch.zeros(groups, size, time)
    for i in range(groups):
        p = int(torch.randint(2, 4, (1,), generator=g))
        prompt = torch.randint(1, vocab, (p,), generator=g)
        for s in range(size):
            end = int(torch.randint(p + 2, time + 1, (1,), generator=g))
            ids[i, s, :end] = torch.cat([prompt, torch.randint(1, vocab, (end - p,), generator=g)])
            mask[i, s, p:end] = 1.0
    return ids, mask

def token_logps(logits, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 ... time-1."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

def _seq_logp(model, ids, mask):
    flat, m = ids.flatten(0, 1), mask.flatten(0, 1)[:, 1:]
    return (token_logps(model(flat), flat) * m).sum(1).view(ids.shape[:2])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask = random_groups(g, 2, 4, 10, 32)
    model = TinyLM()
    with torch.no_grad():
        old = _seq_logp(model, ids, mask) + 0.5 * torch.randn(2, 4, generator=g)
    return {"model": model, "ids": ids, "completion_mask": mask, "old_seq_logp": old, "rewards": torch.rand(2, 4, generator=g)}


def right(model, batch, tau=0.5):
    log_ratio = _seq_logp(model, batch["ids"], batch["completion_mask"]) - batch["old_seq_logp"]
    centred = batch["rewards"] - batch["rewards"].mean(1, keepdim=True)
    return (centred - tau * log_ratio).square().mean() / (2 * tau)


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    surrogate, value = 0.0, 0.0
    for p in range(2):
        for s in range(4):
            lp = sum(model(d["ids"][p, s, :t][None])[0, -1].log_softmax(-1)[d["ids"][p, s, t]] for t in range(1, 10) if d["completion_mask"][p, s, t] == 1)
            a = float(d["rewards"][p, s]) - sum(float(x) for x in d["rewards"][p]) / 4
            lr = lp - d["old_seq_logp"][p, s]
            surrogate = surrogate - (a * lp - 0.5 / 2 * lr ** 2) / 8          # the gradient as the report writes it
            value += (a - 0.5 * lr.item()) ** 2 / 8 / 1.0
    g1, g2 = grads(loss, model), grads(surrogate, model)
    print("loss", loss.item(), "explicit", value)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equals the report's gradient", close(g1, g2))
    assert abs(loss.item() - value) < 1e-5 and close(g1, g2)
