"""Only the 20% of completion tokens with the highest policy entropy get a gradient, yet the divisor counts ALL completion tokens. The entropy selection is
made without gradient over the whole batch. Wang et al. 2025, 'Beyond the 80/20 rule' (the indicator multiplies the surrogate, 1/sum|o_i| stays); TRL top_entropy_quantile = 0.2."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0",
          "completion_mask": "1 where the token was sampled by the policy, [rows, time], aligned with ids",
          "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time-1], constant",
          "advantages": "one advantage per row, [rows], constant"}
SETTINGS = {"clip_low": "lower clip, 0.2", "clip_high": "upper clip, 0.28", "top_entropy": "share of completion tokens that are trained, 0.2"}
NOTES = ("Policy-gradient, PPO-clip family. Reduction: sum over the selected high-entropy tokens divided by the number of all completion tokens of all rows (selected or not). "
         "The entropy threshold is a quantile over the completion tokens of the whole batch, so the loss of a batch is not the average of the losses of its parts. "
         "About 80% of the completion tokens have no gradient by design; a row may have none selected. The selection is not differentiated. "
         "old_logps and advantages are constants. All parameters are used. Any number of rows.")

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
    ids, mask = random_rows(g, 8, 12, 32)
    model = TinyLM()
    with torch.no_grad():
        model.head.weight.mul_(4.0)                      # spread the entropies
        old = (token_logps(model(ids), ids) + 0.2 * torch.randn(8, 11, generator=g)).clamp(max=-0.001)
    return {"model": model, "ids": ids, "completion_mask": mask, "old_logps": old, "advantages": torch.randn(8, generator=g)}


def right(model, batch, clip_low=0.2, clip_high=0.28, top_entropy=0.2):
    ids, mask = batch["ids"], batch["completion_mask"][:, 1:]
    logits = model(ids)
    with torch.no_grad():
        lp = logits[:, :-1].log_softmax(-1)
        entropy = -(lp.exp() * lp).sum(-1)
        threshold = torch.quantile(entropy[mask.bool()], 1.0 - top_entropy)
        fork = (entropy >= threshold).float() * mask
    ratio = torch.exp(token_logps(logits, ids) - batch["old_logps"])
    adv = batch["advantages"].unsqueeze(1)
    per_token = -torch.min(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
    return (per_token * fork).sum() / mask.sum(), {"selected": fork.sum().item() / mask.sum().item()}


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss, metrics = right(model, d)
    tokens = []
    for i in range(8):
        for t in range(1, 12):
            if d["completion_mask"][i, t] == 1:
                lp = model(d["ids"][i:i + 1, :t])[0, -1].log_softmax(-1)
                h = -(lp.exp() * lp).sum().item()
                r, a = torch.exp(lp[d["ids"][i, t]] - d["old_logps"][i, t - 1]), d["advantages"][i]
                tokens.append((h, -torch.min(r * a, r.clamp(0.8, 1.28) * a)))
    tokens.sort(key=lambda x: -x[0])
    # linear-interpolated quantile: the kept ones are those of rank < floor(0.2 * (n - 1)) + 1
    keep = int(0.2 * (len(tokens) - 1)) + 1
    slow = sum(x for _, x in tokens[:keep]) / len(tokens)
    g1, g2 = grads(loss, model), grads(slow, model)
    print("loss", loss.item(), "explicit", slow.item(), "kept", keep, "of", len(tokens), metrics)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    assert abs(loss.item() - slow.item()) < 1e-6 and close(g1, g2)
