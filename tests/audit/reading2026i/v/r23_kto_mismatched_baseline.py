"""KTO with a baseline from mismatched pairs. Ethayarajh et al. 2024 (arXiv 2402.01306): the reference point z0 estimates
KL(policy || reference) from completions paired with the wrong prompts (each prompt with the next row's completion). It is
detached and clamped at 0. Desirable rows use sigmoid(beta * (r - z0)), undesirable ones sigmoid(beta * (z0 - r)); the rows
are not paired, and a batch may hold one kind only."""
import torch
from torch import nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "prompt + completion [rows, time]", "mask": "1 on the completion [rows, time]",
          "kl_ids": "the same prompt + another row's completion [rows, time]", "kl_mask": "1 on that completion",
          "ref_logp": "reference log-probability of the completion, constant [rows]", "kl_ref_logp": "the same for kl_ids, constant [rows]",
          "desirable": "True where the completion is a good one [rows]"}
SETTINGS = {"beta": "0.1", "w_good": "weight of desirable rows, 1.0", "w_bad": "weight of undesirable rows, 1.33"}
NOTES = ("Mean over rows of w * (1 - sigmoid(...)). Log-probabilities are sums over the completion, not means. z0 is the mean over "
         "the batch, without gradient, at least 0: it couples the rows of a batch and needs two or more rows. The forward "
         "on kl_ids has no gradient on purpose.")


class TinyLM(nn.Module):
    """Embedding with learned positions, one attention layer, head."""
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        rows, time = ids.shape
        if positions is None:
            positions = torch.arange(time).expand(rows, time)
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(x + self.out(weights @ v))


def logp_sum(model, ids, mask):
    lp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (lp * mask[:, 1:]).sum(1)


def make(seed):
    torch.manual_seed(seed)
    model, rows = TinyLM(), 6
    prompt, answer = torch.randint(0, 32, (rows, 5)), torch.randint(0, 32, (rows, 6))
    amask = torch.ones(rows, 6)
    amask[1, 4:], amask[3, 3:] = 0, 0
    zeros = torch.zeros(rows, 5)
    ids, mask = torch.cat([prompt, answer], 1), torch.cat([zeros, amask], 1)
    kl_ids, kl_mask = torch.cat([prompt, answer.roll(-1, 0)], 1), torch.cat([zeros, amask.roll(-1, 0)], 1)
    with torch.no_grad():
        ref, kl_ref = logp_sum(model, ids, mask) + torch.randn(rows), logp_sum(model, kl_ids, kl_mask) + torch.randn(rows) - 0.8
    return {"model": model, "batch": {"ids": ids, "mask": mask, "kl_ids": kl_ids, "kl_mask": kl_mask, "ref_logp": ref, "kl_ref_logp": kl_ref,
                                      "desirable": torch.tensor([True, False, True, True, False, False])}}


def right(model, batch, beta=0.1, w_good=1.0, w_bad=1.33):
    with torch.no_grad():
        z0 = (logp_sum(model, batch["kl_ids"], batch["kl_mask"]) - batch["kl_ref_logp"]).mean().clamp(min=0)
    reward = logp_sum(model, batch["ids"], batch["mask"]) - batch["ref_logp"]
    good = 1 - torch.sigmoid(beta * (reward - z0))
    bad = 1 - torch.sigmoid(beta * (z0 - reward))
    loss = torch.where(batch["desirable"], w_good * good, w_bad * bad).mean()
    return loss, {"kl": z0.item(), "reward_good": reward[batch["desirable"]].sum().item()}


if __name__ == "__main__":
    import math
    d = make(0)
    loss, metrics = right(**d)
    loss.backward()
    b, z = d["batch"], metrics["kl"]
    r = (logp_sum(d["model"], b["ids"], b["mask"]) - b["ref_logp"]).tolist()
    slow = sum(1.0 * (1 - 1 / (1 + math.exp(-0.1 * (x - z)))) if g else 1.33 * (1 - 1 / (1 + math.exp(-0.1 * (z - x)))) for x, g in zip(r, b["desirable"])) / 6
    print(loss.item(), slow, metrics, d["model"].head.weight.grad.norm().item())
    assert abs(loss.item() - slow) < 1e-5 and z > 0 and d["model"].head.weight.grad.norm() > 0
