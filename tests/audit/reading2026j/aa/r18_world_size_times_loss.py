"""Accumulation over micro-batches and ranks with one global token count: each micro-loss is a SUM, divided by the tokens of all micro-batches of all ranks, and MULTIPLIED by the world size,
because data parallelism averages gradients over ranks (num_items_in_batch with average_tokens_across_devices in transformers). No division by the number of accumulation steps."""
FAMILY = "optimizers and updates"
KIND = "update"
INPUTS = {"batches": "list over optimizer steps of lists over ranks of lists over micro-batches of {'ids', 'labels'} [rows, time]; labels -100 = not trained; unshifted",
          "optimizer": "any torch optimizer over the model's parameters"}
SETTINGS = {"world": "number of ranks, 2 (must equal the length of each step's list)"}
NOTES = ("Equal to one big batch with the mean over all trained tokens. Micro-batches may differ in number of rows, tokens, and in number per rank; one without any trained token adds 0. Counts are of the SHIFTED labels. "
         "The logged per-rank loss is not a mean: only the gradient after averaging is. Ranks are simulated in one process. A step without any trained token is skipped.")
import torch
from torch import nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    def __init__(self, vocab=23, width=12):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _sum_loss(model, mb):
    return F.cross_entropy(model(mb["ids"])[:, :-1].flatten(0, 1).float(), mb["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")


def right(model, optimizer, batches, world=2):
    params = [p for p in model.parameters() if p.requires_grad]
    for step in batches:
        if len(step) != world:
            raise ValueError("world size")
        tokens = sum(int((mb["labels"][:, 1:] != -100).sum()) for rank in step for mb in rank)      # all-reduce of counts
        if tokens == 0:
            continue
        mean = [torch.zeros_like(p) for p in params]
        for rank in step:
            optimizer.zero_grad(set_to_none=True)
            for mb in rank:
                (_sum_loss(model, mb) * world / tokens).backward()
            for m, p in zip(mean, params):
                if p.grad is not None:
                    m += p.grad / world                                                             # DDP: mean over ranks
        for m, p in zip(mean, params):
            p.grad = m
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    draw = lambda a, b: int(torch.randint(a, b + 1, (1,), generator=g))

    def micro():
        ids = torch.randint(1, 23, (draw(1, 3), draw(3, 9)), generator=g)
        keep = torch.rand(ids.shape, generator=g) < 0.5
        return {"ids": ids, "labels": ids.masked_fill(~keep, -100)}

    batches = [[[micro() for _ in range(draw(1, 3))] for _ in range(2)] for _ in range(3)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), "batches": batches}


if __name__ == "__main__":
    import copy
    for seed in range(4):
        c = make(seed)
        twin = copy.deepcopy(c["model"])
        start = copy.deepcopy(c["model"])
        opt = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
        right(**c)
        for step in c["batches"]:
            nll = []                                   # every trained token of the step, one by one
            for rank in step:
                for mb in rank:
                    lp = torch.log_softmax(twin(mb["ids"]), -1)
                    nll += [-lp[b, t - 1, mb["labels"][b, t]] for b in range(len(lp)) for t in range(1, lp.shape[1]) if mb["labels"][b, t] != -100]
            opt.zero_grad()
            torch.stack(nll).mean().backward()
            opt.step()
        gap = max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), twin.parameters()))
        moved = max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), start.parameters()))
        assert gap < 1e-5 and moved > 1e-2
    print("ok gap", gap, "moved", moved)
