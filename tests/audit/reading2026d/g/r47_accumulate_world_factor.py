"""Accumulation over ranks with a global token count. Each micro-batch loss is a SUM over its tokens, times the number of ranks, over the global token count; the factor looks wrong but cancels the mean that data-parallel averaging takes."""
FAMILY = "updates"
KIND = "update"
INPUTS = {"batches": "batches[rank][micro] = dict with ids and loss_mask; ranks simulated"}
SETTINGS = {"max_norm": "clip after averaging, 1.0"}
NOTES = "Result equals one big batch with a mean over all trained tokens, for any number of ranks and micro-batches and uneven tokens. A micro-batch without trained tokens is allowed."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), shape [rows, time-1]."""
    lp = F.log_softmax(model(ids)[:, :-1].float(), dim=-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def make(seed):
    torch.manual_seed(seed)
    mk = lambda r, t: {"ids": torch.randint(1, V, (r, t)), "loss_mask": (torch.rand(r, t) < 0.6).float()}
    batches = [[mk(2, 8), mk(1, 5)], [mk(3, 6), mk(2, 9)]]
    batches[0][1]["loss_mask"].zero_()
    model = Tiny()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.5), "batches": batches}


def right(model, optimizer, batches, max_norm=1.0):
    world = len(batches)
    total = sum(b["loss_mask"][:, 1:].sum() for rank in batches for b in rank)
    params = list(model.parameters())
    per_rank = []
    for rank in batches:
        optimizer.zero_grad()
        for b in rank:
            s = -(token_logps(model, b["ids"]) * b["loss_mask"][:, 1:]).sum()
            (s * world / total).backward()
        per_rank.append([p.grad.clone() for p in params])
    for i, p in enumerate(params):
        p.grad = torch.stack([g[i] for g in per_rank]).mean(0)     # what DDP does
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    b = make(0); start = {k: v.clone() for k, v in b["model"].state_dict().items()}
    right(**b); ref = Tiny(); ref.load_state_dict(start)
    allb = [x for r in b["batches"] for x in r]
    loss = -torch.cat([token_logps(ref, x["ids"])[x["loss_mask"][:, 1:] == 1] for x in allb]).mean()
    loss.backward(); torch.nn.utils.clip_grad_norm_(ref.parameters(), 1.0); torch.optim.SGD(ref.parameters(), .5).step()
    gap = max((p - q).abs().max().item() for p, q in zip(ref.parameters(), b["model"].parameters()))
    moved = max((start[k] - v).abs().max().item() for k, v in b["model"].state_dict().items())
    assert gap < 1e-6 and moved > 1e-4
    print("gap to the big batch", gap, "moved", moved)
