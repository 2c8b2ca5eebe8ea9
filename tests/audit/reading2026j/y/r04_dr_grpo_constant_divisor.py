"""Dr. GRPO: the token sum is divided by rows * max_completion_length, a constant, and not by the number of tokens; the advantage is
reward minus group mean without the standard deviation. Both 'missing' normalisations are the point: they remove the length and
difficulty bias of GRPO (Liu et al. 2025, 'Understanding R1-Zero-like training'; TRL loss_type="dr_grpo")."""
import torch
from torch import nn

FAMILY = "policy-gradient losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right padded with 0",
          "completion_mask": "1 where the token was sampled by the policy, [rows, time], aligned with ids",
          "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time-1], constant",
          "rewards": "one reward per row, [rows], constant",
          "group": "prompt number of each row, [rows], 0 ... groups-1; rows of one prompt need not be adjacent"}
SETTINGS = {"clip": "PPO clip, 0.2", "max_completion_length": "generation budget in tokens, 12; a constant that divides the loss, whatever the true lengths"}
NOTES = ("Policy-gradient, PPO-clip family. Reduction: token sum over all rows / (rows * max_completion_length). Doubling max_completion_length halves the loss by design. "
         "Advantages are computed inside from the rewards of the batch: whole groups must be in the batch (at least two rows each). "
         "rewards, old_logps are constants. All parameters are used. Groups may be of different size.")

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

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    group = torch.tensor([0, 1, 0, 2, 1, 0, 2, 1])
    all_ids, all_mask = random_groups(g, 3, 8, 12, 32)
    ids, mask = all_ids[group, torch.arange(8)], all_mask[group, torch.arange(8)]
    model = TinyLM()
    with torch.no_grad():
        old = token_logps(model(ids), ids) + 0.2 * torch.randn(8, 11, generator=g)
    rewards = torch.randint(0, 2, (8,), generator=g).float() + 0.25 * torch.rand(8, generator=g)
    return {"model": model, "ids": ids, "completion_mask": mask, "old_logps": old, "rewards": rewards, "group": group}


def right(model, batch, clip=0.2, max_completion_length=12):
    ids, mask, group = batch["ids"], batch["completion_mask"][:, 1:], batch["group"]
    n = int(group.max()) + 1
    mean = batch["rewards"].new_zeros(n).index_add(0, group, batch["rewards"]) / torch.bincount(group, minlength=n).clamp(min=1)
    adv = (batch["rewards"] - mean[group]).unsqueeze(1)
    ratio = torch.exp(token_logps(model(ids), ids) - batch["old_logps"])
    per_token = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return (per_token * mask).sum() / (ids.shape[0] * max_completion_length)


def grads(loss, model):
    return [g if g is not None else torch.zeros_like(p)
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True))]


def close(a, b, tol=1e-5):
    return all(torch.allclose(x, y, rtol=1e-4, atol=tol) for x, y in zip(a, b))

if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    total = 0.0
    for i in range(8):
        same = [float(d["rewards"][j]) for j in range(8) if d["group"][j] == d["group"][i]]
        a = float(d["rewards"][i]) - sum(same) / len(same)
        for t in range(1, 12):
            if d["completion_mask"][i, t] == 1:
                lp = model(d["ids"][i:i + 1, :t])[0, -1].log_softmax(-1)[d["ids"][i, t]]
                r = torch.exp(lp - d["old_logps"][i, t - 1])
                total = total - torch.min(r * a, r.clamp(0.8, 1.2) * a)
    total = total / (8 * 12)
    g1, g2 = grads(loss, model), grads(total, model)
    print("loss", loss.item(), "explicit", total.item(), "tokens", d["completion_mask"].sum().item(), "divisor", 96)
    print("gradient norm", sum((g ** 2).sum() for g in g1).sqrt().item(), "equal", close(g1, g2))
    print("budget 24 gives half:", right(model, d, max_completion_length=24).item())
    assert abs(loss.item() - total.item()) < 1e-6 and close(g1, g2)
