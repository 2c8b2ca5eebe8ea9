"""Overlong episodes are masked in the loss but stay in the baseline (overlong filtering of DAPO, arXiv 2503.14476; mask_truncated_completions).
An episode cut at the token limit trains nothing, neither up nor down; its reward still counts in the mean and deviation of its group, since it
is a fair sample of the policy. Tool output inside the episodes is masked too. The denominator is the number of tokens that are trained."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; rows of one prompt are adjacent", "action_mask": "1 on tokens sampled by the policy, 0 on prompt, tool output and padding, [rows, time]",
          "old_logprobs": "log-probability of each token at sampling, 0 where not sampled, [rows, time]", "rewards": "reward of each row, [rows]",
          "truncated": "1 where the episode hit the token limit, [rows]"}
SETTINGS = {"group": "rows per prompt, 4; divides the number of rows", "clip": "PPO clip, 0.2"}
NOTES = ("GRPO advantages (reward minus mean over deviation of the group, all rows of the group), clipped ratio, mean over the trained tokens of all rows. Rows with truncated=1 have no gradient "
         "but do move the advantages of their group. old_logprobs, rewards, masks are constants. Every parameter is used. At least one row must not be truncated.")
import torch
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    """One causal attention layer: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=40, width=16, length=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allow=None):
        t = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.pos(t if positions is None else positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        allow = (t[:, None] >= t[None]) if allow is None else allow
        return self.head(x + score.masked_fill(~allow, float("-inf")).softmax(-1) @ v)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, 40, (8, 14), generator=g)
    mask = torch.zeros(8, 14)
    mask[:, 3:7] = 1
    mask[:, 9:12] = 1                       # 7 and 8 are tool output
    lengths = torch.randint(10, 15, (8,), generator=g)
    mask *= torch.arange(14) < lengths[:, None]
    with torch.no_grad():
        lp = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    old = torch.zeros(8, 14)
    old[:, 1:] = lp + 0.2 * torch.randn(8, 13, generator=g)
    truncated = torch.tensor([0., 1, 0, 0, 0, 0, 1, 0])
    rewards = torch.rand(8, generator=g) * (1 - truncated)
    return {"model": model, "ids": ids, "action_mask": mask, "old_logprobs": old * mask, "rewards": rewards, "truncated": truncated}


def right(model, batch, group=4, clip=0.2):
    r = batch["rewards"].view(-1, group)
    adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    mask = (batch["action_mask"] * (1 - batch["truncated"])[:, None])[:, 1:]
    logp = model(batch["ids"]).log_softmax(-1)[:, :-1].gather(-1, batch["ids"][:, 1:, None])[..., 0]
    ratio = (logp - batch["old_logprobs"][:, 1:]).exp()
    loss = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    return (loss * mask).sum() / mask.sum()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    loss.backward()
    lp = m(d["ids"]).log_softmax(-1)
    tot = n = 0.0
    for i in range(8):
        if d["truncated"][i]:
            continue
        gr = d["rewards"][i // 4 * 4: i // 4 * 4 + 4]
        a = ((d["rewards"][i] - gr.mean()) / (gr.std() + 1e-4)).item()
        for t in range(1, 14):
            if d["action_mask"][i, t]:
                q = (lp[i, t - 1, d["ids"][i, t]] - d["old_logprobs"][i, t]).exp().item()
                tot -= min(q * a, max(0.8, min(1.2, q)) * a)
                n += 1
    print(loss.item(), tot / n, "gradient", m.head.weight.grad.norm().item())
    assert abs(loss.item() - tot / n) < 1e-5 and m.head.weight.grad.norm() > 0
