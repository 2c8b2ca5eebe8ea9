"""Zigzag context parallelism. To balance causal attention (Megatron, ring-flash-attention, torch's context parallel) the
sequence is cut in 2N chunks and rank r takes chunks r and 2N-1-r, so a rank's tokens are not contiguous and its
positions jump. Labels are shifted before the cut, since a rank does not hold the token after its chunk."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "[rows, time + 1]", "loss_mask": "1 where the token is trained [rows, time + 1]"}
SETTINGS = {"cp": "context-parallel ranks, 2; time must be a multiple of 2 * cp"}
NOTES = ("Mean cross-entropy over all trained tokens; ranks are simulated: queries are local to the rank, keys and values "
         "come from all ranks with their positions. Each rank gives the sum over its tokens; the sums and the counts "
         "are added over ranks, then divided. Needs time divisible by 2 * cp.")


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


def make(seed):
    torch.manual_seed(seed)
    mask = (torch.rand(3, 17) < 0.6).float()
    mask[:, 9:] = (torch.rand(3, 8) < 0.9).float()
    return {"model": TinyLM(), "batch": {"ids": torch.randint(0, 32, (3, 17)), "loss_mask": mask}}


def right(model, batch, cp=2):
    inputs, labels, keep = batch["ids"][:, :-1], batch["ids"][:, 1:], batch["loss_mask"][:, 1:]
    rows, time = inputs.shape
    chunks = torch.arange(time).view(2 * cp, -1)
    local = [torch.cat([chunks[r], chunks[2 * cp - 1 - r]]) for r in range(cp)]
    parts = []
    for pos in local:                                                       # each rank embeds and projects its own tokens
        x = model.tok(inputs[:, pos]) + model.pos(pos)
        parts.append((x, *model.qkv(x).chunk(3, -1)))
    all_pos = torch.cat(local)
    k, v = torch.cat([p[2] for p in parts], 1), torch.cat([p[3] for p in parts], 1)      # all-gather, in rank order
    total, count = 0.0, 0.0
    for pos, (x, q, _, _) in zip(local, parts):
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(all_pos[None, :] > pos[:, None], float("-inf"))
        logits = model.head(x + model.out(scores.softmax(-1) @ v))
        nll = F.cross_entropy(logits.transpose(1, 2), labels[:, pos], reduction="none")
        total = total + (nll * keep[:, pos]).sum()
        count = count + keep[:, pos].sum()
    return total / count


if __name__ == "__main__":
    d = make(0)
    loss = right(**d)
    g = torch.autograd.grad(loss, d["model"].qkv.weight)[0]
    b = d["batch"]
    nll = F.cross_entropy(d["model"](b["ids"][:, :-1]).transpose(1, 2), b["ids"][:, 1:], reduction="none")
    plain = (nll * b["loss_mask"][:, 1:]).sum() / b["loss_mask"][:, 1:].sum()
    h = torch.autograd.grad(plain, d["model"].qkv.weight)[0]
    print(loss.item(), plain.item(), (g - h).abs().max().item(), right(**make(0), cp=4).item())
    assert torch.allclose(loss, plain, atol=1e-5) and torch.allclose(g, h, atol=1e-5) and g.norm() > 0
