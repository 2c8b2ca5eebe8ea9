"""KTO (arXiv:2402.01306; ContextualAI/HALOs, TRL KTOTrainer). The reference point z0 is a KL estimate from MISMATCHED pairs:
each prompt is joined with the completion of the next row of the batch. It is detached, and clamped at zero after the mean
over the batch. Desirable rows use 1 - sigmoid(r - z0), undesirable rows 1 - sigmoid(z0 - r); the two have different weights.
So the loss of a row depends on the other rows, through a term with no gradient."""
import torch
import torch.nn as nn

FAMILY = "preferences"
KIND = "loss"
INPUTS = {"ids": "prompt and own completion, right padded with 0, [rows, time]",
          "completion_mask": "1 on completion tokens of ids, [rows, time]",
          "kl_ids": "prompt and the completion of the next row (cyclic), right padded with 0, [rows, time]",
          "kl_mask": "1 on completion tokens of kl_ids, [rows, time]",
          "desirable": "1 for a desirable completion, 0 for an undesirable one, [rows]",
          "ref_logps": "summed log-prob of the own completion under the frozen reference, [rows]",
          "ref_kl_logps": "summed log-prob of the mismatched completion under the frozen reference, [rows]"}
SETTINGS = {"beta": "KTO beta, 0.3", "desirable_weight": "weight of desirable rows, 1.0", "undesirable_weight": "weight of undesirable rows, 1.5"}
NOTES = ("KTO loss: r = beta * (policy - reference log-prob of the own completion), z0 = beta * max(0, mean over the rows of "
         "policy - reference log-prob of the mismatched completion), z0 without gradient; desirable rows: weight * (1 - "
         "sigmoid(r - z0)), undesirable rows: weight * (1 - sigmoid(z0 - r)); mean over all rows of the batch (not over the "
         "sum of weights). Rows are coupled through z0 on purpose. The reference log-probs are constants. Padding has no "
         "effect. All parameters are used. At least two rows.")


class TinyLM(nn.Module):
    """One causal attention layer with learned positions; logits [rows, time, vocabulary]."""

    def __init__(self, vocabulary=24, width=16, positions=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)

    def hidden(self, ids, position_ids=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.embed(ids) + self.position(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        document = (position_ids == 0).cumsum(-1)
        allowed = torch.ones(time, time, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None, :])
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        return x + scores.softmax(-1) @ v

    def forward(self, ids, position_ids=None):
        return self.head(self.hidden(ids, position_ids))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, reference = TinyLM(), TinyLM()
    rows, prompt = 6, 3
    prompts = torch.randint(1, 24, (rows, prompt), generator=g)
    completions = [torch.randint(1, 24, (int(n),), generator=g) for n in torch.randint(1, 8, (rows,), generator=g)]
    time = prompt + max(len(c) for c in completions)

    def join(answers):
        ids, mask = torch.zeros(rows, time, dtype=torch.long), torch.zeros(rows, time)
        for i, c in enumerate(answers):
            ids[i, :prompt], ids[i, prompt:prompt + len(c)] = prompts[i], c
            mask[i, prompt:prompt + len(c)] = 1
        return ids, mask

    ids, mask = join(completions)
    kl_ids, kl_mask = join(completions[1:] + completions[:1])
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters()):
            q.copy_(p + 0.1 * torch.randn(p.shape, generator=g))
        ref, ref_kl = _logps(reference, ids, mask), _logps(reference, kl_ids, kl_mask)
        policy_kl = _logps(model, kl_ids, kl_mask)
        ref_kl = ref_kl + ((policy_kl - ref_kl).mean() - 0.5)
    desirable = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])[torch.randperm(rows, generator=g)]
    return {"model": model, "ids": ids, "completion_mask": mask, "kl_ids": kl_ids, "kl_mask": kl_mask,
            "desirable": desirable, "ref_logps": ref, "ref_kl_logps": ref_kl}


def _logps(model, ids, mask):
    logps = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logps * mask[:, 1:]).sum(1)


def right(model, batch, beta=0.3, desirable_weight=1.0, undesirable_weight=1.5):
    with torch.no_grad():
        z0 = (_logps(model, batch["kl_ids"], batch["kl_mask"]) - batch["ref_kl_logps"]).mean().clamp(min=0)
    ratio = _logps(model, batch["ids"], batch["completion_mask"]) - batch["ref_logps"]
    good = desirable_weight * (1 - torch.sigmoid(beta * (ratio - z0)))
    bad = undesirable_weight * (1 - torch.sigmoid(beta * (z0 - ratio)))
    return torch.where(batch["desirable"] > 0, good, bad).mean()


if __name__ == "__main__":
    import math
    batch = make(0)
    model = batch.pop("model")
    loss = right(model, batch)
    loss.backward()

    def total(ids, mask):
        lp = model(ids).log_softmax(-1)
        return [sum(lp[r, t - 1, ids[r, t]].item() for t in range(1, ids.shape[1]) if mask[r, t]) for r in range(len(ids))]

    z0 = max(0.0, sum(a - b.item() for a, b in zip(total(batch["kl_ids"], batch["kl_mask"]), batch["ref_kl_logps"])) / 6)
    slow = 0.0
    for lp, ref, d in zip(total(batch["ids"], batch["completion_mask"]), batch["ref_logps"].tolist(), batch["desirable"].tolist()):
        x = 0.3 * (lp - ref - z0)
        slow += (1 - 1 / (1 + math.exp(-x)) if d else 1.5 * (1 - 1 / (1 + math.exp(x)))) / 6
    print(loss.item(), slow, "z0", z0, "gradient", model.head.weight.grad.norm().item())
    assert abs(loss.item() - slow) < 1e-5 and model.head.weight.grad.norm() > 0
