"""The loss of each rank is multiplied by the number of ranks. DDP and FSDP average gradients over ranks. To get the mean
over the tokens of all ranks, every rank divides its sum by the global token count and multiplies by the world size, which
the average takes back (verl's agg_loss, transformers' average_tokens_across_devices). The local loss is no mean of
anything local and a rank without trained tokens takes part with zero."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "one batch per rank: ids [rows, time], loss_mask [rows, time] (1 = trained target)"}
SETTINGS = {}
NOTES = ("One SGD step. Objective: mean over trained tokens of all ranks. Ranks are simulated one after the other in one "
         "process, gradients averaged over ranks as DDP does. Ranks may have different numbers of rows and tokens, also "
         "none trained.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    batches = []
    for r, rows in enumerate((2, 1, 3, 2)):
        t = int(torch.randint(5, 11, (1,), generator=g))
        mask = (torch.arange(t)[None] >= torch.randint(1, t - 1, (rows, 1), generator=g)).float()
        batches.append({"ids": torch.randint(1, 32, (rows, t), generator=g), "loss_mask": mask * (r != 3)})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def _nll_sum(model, b):
    nll = F.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:], reduction="none")
    return (nll * b["loss_mask"][:, 1:]).sum()


def right(model, optimizer, batches):
    world = len(batches)
    global_tokens = sum(b["loss_mask"][:, 1:].sum() for b in batches)          # all_reduce
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for b in batches:                                                          # the ranks
        loss = _nll_sum(model, b) / global_tokens * world
        for t, g in zip(total, torch.autograd.grad(loss, params)):
            t += g
    optimizer.zero_grad()
    for p, t in zip(params, total):
        p.grad = t / world                                                     # DDP averages
    optimizer.step()


if __name__ == "__main__":
    a, b = make(0), make(0)
    right(**a)
    opt = b["optimizer"]
    loss = sum(_nll_sum(b["model"], x) for x in b["batches"]) / sum(x["loss_mask"][:, 1:].sum() for x in b["batches"])
    loss.backward()
    opt.step()
    diff = max((p - q).abs().max().item() for p, q in zip(a["model"].parameters(), b["model"].parameters()))
    moved = max((p - q).abs().max().item() for p, q in zip(a["model"].parameters(), make(0)["model"].parameters()))
    print("largest difference to one process", diff, "size of the step", moved)
    assert diff < 1e-6 < 1e-3 < moved
