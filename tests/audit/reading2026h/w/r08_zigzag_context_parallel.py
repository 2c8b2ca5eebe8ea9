"""Context parallel with zigzag order: rank i holds chunks i and 2n-1-i of the sequence.
Ring attention in Megatron-LM, torchtitan and others, to give each rank the same amount of causal work. On a rank the tokens are not in order and not next to each other, so labels must be shifted before the split, and causality is
decided by position and not by index. Each rank's loss is its sum over the token count of all ranks, and the ranks' losses are added."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token (as a target) is trained, [rows, time]"}
SETTINGS = {"cp": "context-parallel ranks, 2"}
NOTES = "Cross entropy, mean over trained tokens of all rows and ranks. time must divide by 2 * cp. The ranks are simulated in one process; keys and values are gathered. All parameters used."

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": TinyLM(), "ids": torch.randint(0, 29, (3, 16), generator=g), "loss_mask": (torch.rand(3, 16, generator=g) < 0.7).float()}


def right(model, batch, cp=2):
    ids = batch["ids"]
    labels = F.pad(ids[:, 1:], (0, 1))                      # shifted before the split
    weight = F.pad(batch["loss_mask"][:, 1:], (0, 1))
    pos = torch.arange(ids.shape[1]).expand_as(ids)
    chunks = pos[0].chunk(2 * cp)
    order = torch.cat([torch.cat([chunks[r], chunks[2 * cp - 1 - r]]) for r in range(cp)])
    ids, labels, weight, pos = (x[:, order] for x in (ids, labels, weight, pos))
    logits = model(ids, pos, pos[:, :, None] >= pos[:, None, :])
    total = weight.sum()                                    # all-reduced count
    loss = 0.0
    for lo, la, we in zip(logits.chunk(cp, 1), labels.chunk(cp, 1), weight.chunk(cp, 1)):
        nll = F.cross_entropy(lo.transpose(1, 2), la, reduction="none")
        loss = loss + (nll * we).sum() / total              # sum over ranks, no mean
    return loss


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss = right(m, d); loss.backward()
    nll = F.cross_entropy(m(d["ids"])[:, :-1].transpose(1, 2), d["ids"][:, 1:], reduction="none")
    plain = (nll * d["loss_mask"][:, 1:]).sum() / d["loss_mask"][:, 1:].sum()
    print("zigzag", loss.item(), "plain", plain.item(), "gradient", m.q.weight.grad.norm().item())
    assert torch.allclose(loss, plain, atol=1e-5) and torch.allclose(right(m, d, cp=4), plain, atol=1e-5)
