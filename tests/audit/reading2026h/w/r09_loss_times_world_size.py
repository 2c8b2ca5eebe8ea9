"""Each rank multiplies its loss by the number of ranks.
transformers Trainer (num_items_in_batch with average_tokens_across_devices) and torchtune. The sum of a rank's token losses is divided by the token count of all ranks and micro-batches; data-parallel averaging divides by the
world size once more, and the factor undoes that. The loss of a rank looks world-size times too big, and is no mean over anything on that rank."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "tiny LM", "optimizer": "SGD", "batches": "list over ranks of lists of micro-batches {ids [rows, time], mask [rows, time]}"}
SETTINGS = {}
NOTES = "One optimizer step. Mean over trained tokens of all ranks and micro-batches together. Gradients are accumulated over micro-batches (no division by their number) and averaged over ranks. Ranks and micro-batches may differ in size; a rank may have no trained token in one micro-batch."

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
    model = TinyLM()
    batches = [[{"ids": torch.randint(0, 29, (2, int(t)), generator=g), "mask": (torch.rand(2, int(t), generator=g) < p).float()}
                for t in torch.randint(6, 14, (2,), generator=g)] for p in (0.9, 0.3, 0.6)]
    batches[1][0]["mask"].zero_()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def _nll_sum(model, mb):
    nll = F.cross_entropy(model(mb["ids"])[:, :-1].transpose(1, 2), mb["ids"][:, 1:], reduction="none")
    return (nll * mb["mask"][:, 1:]).sum()


def right(model, optimizer, batches):
    world = len(batches)
    tokens = sum(mb["mask"][:, 1:].sum() for micro in batches for mb in micro)      # all-reduced once
    per_rank = []
    for micro in batches:
        optimizer.zero_grad()
        for mb in micro:
            (_nll_sum(model, mb) / tokens * world).backward()
        per_rank.append([p.grad.clone() for p in model.parameters()])
    for i, p in enumerate(model.parameters()):
        p.grad = torch.stack([grads[i] for grads in per_rank]).mean(0)              # what DDP does
    optimizer.step()


if __name__ == "__main__":
    a, b = make(0), make(0)
    right(**a)
    flat = [mb for micro in b["batches"] for mb in micro]
    (sum(_nll_sum(b["model"], mb) for mb in flat) / sum(mb["mask"][:, 1:].sum() for mb in flat)).backward()
    b["optimizer"].step()
    diff = max((x - y).abs().max().item() for x, y in zip(a["model"].parameters(), b["model"].parameters()))
    move = (a["model"].head.weight - make(0)["model"].head.weight).norm().item()
    print("difference to one process", diff, "step length", move)
    assert diff < 1e-5 and move > 1e-3
