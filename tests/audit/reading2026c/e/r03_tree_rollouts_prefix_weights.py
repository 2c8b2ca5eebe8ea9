"""Rollouts that branch share prefixes; the rows of the leaves repeat the shared tokens. Each repeated token is weighted by
1 / (rows that share it), so a token of the tree counts once, with the mean advantage of the leaves below it. The weights
make the loss a fractional-mask loss whose denominator is the number of tree tokens."""
FAMILY = "agents"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "one row per leaf: the path from the root, [leaves, time]", "action_mask": "1 on tokens the policy wrote, [leaves, time]",
          "node": "id of the tree node (token) at each place; equal ids are the same token of the tree, [leaves, time]",
          "advantages": "one per leaf, [leaves], constant"}
SETTINGS = {}
NOTES = ("REINFORCE over the tree: mean over distinct policy tokens of -(mean advantage of the leaves below) * logp. The "
         "number of leaves below a token is the number of rows with its node id.")


class TinyLM(nn.Module):
    """One causal attention layer; positions are learned."""

    def __init__(self, vocab=29, width=16, length=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, allowed=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.tok(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        see = torch.ones(time, time, dtype=torch.bool).tril().expand(rows, time, time)
        if allowed is not None:
            see = allowed
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, :]
        score = score.masked_fill(~see, -1e9)
        return self.head(x + self.out(torch.tanh(score.softmax(-1) @ v)))


def make(seed):
    torch.manual_seed(seed)
    shared, a, b = [torch.randint(0, 29, (n,)) for n in (5, 3, 3)]
    leaf = lambda mid: torch.cat([shared, mid, torch.randint(0, 29, (4,))])
    ids = torch.stack([leaf(a), leaf(a), leaf(b)])
    node = torch.zeros_like(ids)
    node[:, :5] = torch.arange(5)
    node[:2, 5:8] = torch.arange(100, 103)
    node[2, 5:8] = torch.arange(200, 203)
    for r in range(3):
        node[r, 8:] = torch.arange(4) + 1000 * (r + 1)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    return {"model": TinyLM(), "ids": ids, "action_mask": mask, "node": node, "advantages": torch.randn(3)}


def right(model, batch):
    ids, mask = batch["ids"], batch["action_mask"].float()
    _, where, count = batch["node"].unique(return_inverse=True, return_counts=True)
    weight = (mask / count[where].float())[:, 1:]
    logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(logp * batch["advantages"][:, None] * weight).sum() / weight.sum()


if __name__ == "__main__":
    data = make(0)
    model = data.pop("model")
    loss = right(model, data)
    loss.backward()
    logp = model(data["ids"]).log_softmax(-1)
    tokens = {}
    for r in range(3):
        for t in range(2, data["ids"].shape[1]):
            tokens.setdefault(data["node"][r, t].item(), []).append(
                (data["advantages"][r].item(), logp[r, t - 1, data["ids"][r, t]].item()))
    slow = -sum(sum(a for a, _ in v) / len(v) * v[0][1] for v in tokens.values()) / len(tokens)
    print(loss.item(), slow, "grad", sum(p.grad.norm() for p in model.parameters()).item())
    assert abs(loss.item() - slow) < 1e-4
