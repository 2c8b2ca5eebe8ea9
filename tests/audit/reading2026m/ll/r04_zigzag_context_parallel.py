"""Zigzag context parallelism (Megatron-LM, ring-flash-attention): the sequence is cut into 2*cp chunks and rank r gets the chunks r and 2*cp-1-r, which balances causal attention. Labels are shifted BEFORE the cut,
so that a rank does not shift again, its tokens are not contiguous, and its mask is not triangular."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; time is a multiple of 2*cp", "loss_mask": "1 where the token is trained, [rows, time], belongs to the token itself"}
SETTINGS = {"cp": "number of context-parallel ranks, 2"}
VALUES = {"cp": 2}
NOTES = """Next-token cross-entropy of a causal attention model whose sequence dimension is spread over cp ranks (simulated in one process). Targets are shifted once on the full row (target of position t is token t+1 with token t+1's mask;
the last position has none), then ids, positions, targets and masks are cut: the row is divided into 2*cp equal chunks and rank r holds the chunks r and 2*cp-1-r, in that order. Queries are local; keys and values are gathered
from all ranks with their gradient; a query at position t sees all keys at positions <= t. Every rank sums the losses of its trained targets; the sum over ranks divided by the number of trained targets of all ranks and rows is the loss.
It equals the loss of the unsharded model. Needs time % (2*cp) == 0 and time <= 32; any number of rows. All parameters are used."""


class Attn(nn.Module):
    def __init__(self, vocab=25, width=16):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(32, width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, vocab)

    def embed(self, ids, pos):
        return self.emb(ids) + self.pos(pos)

    def attend(self, x, pos, keys, values, key_pos):
        s = self.q(x) @ keys.transpose(1, 2) / x.shape[-1] ** 0.5
        s = s.masked_fill(key_pos[None, None, :] > pos[None, :, None], float("-inf"))
        return self.head(x + s.softmax(-1) @ values)


def make(seed):
    torch.manual_seed(seed)
    mask = (torch.rand(3, 12) < 0.6).long(); mask[0, 5] = 1
    return {"model": Attn(), "ids": torch.randint(0, 25, (3, 12)), "loss_mask": mask}


def right(model, batch, cp=2):
    ids, time = batch["ids"], batch["ids"].shape[1]
    target = torch.roll(ids, -1, 1)
    mask = torch.roll(batch["loss_mask"], -1, 1)
    mask = torch.cat([mask[:, :-1], torch.zeros_like(mask[:, :1])], 1)
    chunks = torch.arange(time).chunk(2 * cp)
    local_pos = [torch.cat([chunks[r], chunks[2 * cp - 1 - r]]) for r in range(cp)]
    local_x = [model.embed(ids[:, p], p) for p in local_pos]
    keys = torch.cat([model.k(x) for x in local_x], 1)
    values = torch.cat([model.v(x) for x in local_x], 1)
    key_pos = torch.cat(local_pos)
    total, count = 0.0, 0
    for x, p in zip(local_x, local_pos):
        logits = model.attend(x, p, keys, values, key_pos)
        nll = F.cross_entropy(logits.flatten(0, 1), target[:, p].flatten(), reduction="none")
        total = total + (nll * mask[:, p].flatten()).sum()
        count = count + mask[:, p].sum()
    return total / count


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss = right(m, b, **VALUES); loss.backward()
    got = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    pos = torch.arange(12); x = m.embed(b["ids"], pos)
    lg = m.attend(x, pos, m.k(x), m.v(x), pos)[:, :-1].flatten(0, 1); mk = b["loss_mask"][:, 1:].flatten().float()
    ref = (F.cross_entropy(lg, b["ids"][:, 1:].flatten(), reduction="none") * mk).sum() / mk.sum(); ref.backward()
    print(loss.item(), ref.item(), right(m, b, cp=3).item(), "max gradient difference", max(float((a - p.grad).abs().max()) for a, p in zip(got, m.parameters())))
