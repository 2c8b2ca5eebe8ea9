"""Replay-buffer swap drops tool_mask. huggingface/trl#6804 (also noted in the thread of PR #6439), https://github.com/huggingface/trl/issues/6804, 2026.
GRPOWithReplayBufferTrainer replaces groups without reward variance by stored groups and builds a new output dict. That dict carried ids, completion_mask and advantages but not tool_mask, and the loss falls back to completion_mask when the key is absent.
After each swap the tool-result tokens, which the policy did not write, are trained. Numerator and denominator still agree, so nothing looks wrong."""
import torch
from torch import nn
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; rows come in groups of 2", "completion_mask": "1 on the completion (policy and tool tokens), 0 on prompt and padding, [rows, time]", "tool_mask": "1 on tokens the policy sampled, 0 on inserted tool-result tokens, [rows, time]", "advantages": "group-relative advantage per row, [rows]; zero in a group without variance", "buf_ids": "ids of stored rows, same shape as ids", "buf_completion_mask": "completion mask of stored rows", "buf_tool_mask": "tool mask of stored rows", "buf_advantages": "advantages of stored rows"}
SETTINGS = {}
NOTES = "On-policy policy gradient (ratio exp(lp - lp.detach()), no clip, no KL). Rows of a group with zero advantages are replaced by the stored rows at the same place. Mean over trained tokens of all rows; trained tokens are those of completion_mask times tool_mask. Token t is predicted from position t-1. Masks, ids and advantages are constants. Uses all parameters of the model."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    n, t = 4, 12

    def rows():
        ids = torch.randint(0, 32, (n, t))
        comp, tool = torch.zeros(n, t), torch.ones(n, t)
        for i in range(n):
            end = 10 + i % 3
            comp[i, 3:end] = 1
            a = 5 + int(torch.randint(0, 2, (1,)))
            tool[i, a:a + 3] = 0
        return ids, comp, tool
    ids, comp, tool = rows()
    bids, bcomp, btool = rows()
    return {"model": TinyLM(), "ids": ids, "completion_mask": comp, "tool_mask": tool,
            "advantages": torch.tensor([0.7, -0.7, 0.0, 0.0]),
            "buf_ids": bids, "buf_completion_mask": bcomp, "buf_tool_mask": btool,
            "buf_advantages": torch.tensor([0.9, -0.9, 1.1, -1.1])}


def _swap(batch, keys):
    dead = (batch["advantages"] == 0).view(-1, 2).all(1).repeat_interleave(2)
    if not dead.any():
        return batch
    out = {}
    for k in keys:
        d = dead.view(-1, *([1] * (batch[k].dim() - 1)))
        out[k] = torch.where(d, batch["buf_" + k], batch[k])
    return out


def _loss(model, b):
    lp = model(b["ids"])[:, :-1].log_softmax(-1).gather(-1, b["ids"][:, 1:, None])[..., 0]
    mask = b["completion_mask"]
    if "tool_mask" in b:
        mask = mask * b["tool_mask"]
    mask = mask[:, 1:]
    ratio = (lp - lp.detach()).exp()
    return -(ratio * b["advantages"][:, None] * mask).sum() / mask.sum()


def broken(model, batch):
    return _loss(model, _swap(batch, ("ids", "completion_mask", "advantages")))


def right(model, batch):
    return _loss(model, _swap(batch, ("ids", "completion_mask", "tool_mask", "advantages")))


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    g = {}
    for f in (broken, right):
        m.zero_grad()
        loss = f(m, d)
        loss.backward()
        g[f.__name__] = torch.cat([p.grad.flatten() for p in m.parameters()])
        print(f.__name__, "loss", loss.item(), "grad norm", g[f.__name__].norm().item())
    print("gradient difference", (g["broken"] - g["right"]).norm().item())
    assert (g["broken"] - g["right"]).norm() > 1e-3
