"""Token-exact accumulation under DDP (transformers num_items_in_batch with average_tokens_across_devices). Each micro-batch loss is a SUM divided by the tokens of all
micro-batches of all ranks and then multiplied by the world size, because DDP averages the gradients afterwards. No division by the number of accumulation steps."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "updates with accumulation"
KIND = "update"
INPUTS = {"model": "a language model", "optimizer": "any torch optimizer", "batches": "list over ranks of lists of micro-batches {ids, labels}, labels -100 where not trained, already shifted"}
SETTINGS = {"max_norm": "gradient clip after averaging, 1.0"}
NOTES = "One step, equal to one big batch with the mean over all trained tokens. Ranks are simulated in one process: gradients of each rank are formed alone, then averaged. Micro-batches without a trained token give a zero gradient. Ranks may have different numbers of micro-batches (at least one each), and some token must be trained."


class TinyLM(nn.Module):
    def __init__(self, vocab=23, width=12):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    torch.manual_seed(seed); g = torch.Generator().manual_seed(seed)

    def micro(rows, share):
        labels = torch.randint(0, 23, (rows, 7), generator=g)
        return {"ids": torch.randint(0, 23, (rows, 7), generator=g), "labels": labels.masked_fill(torch.rand(rows, 7, generator=g) > share, -100)}

    model = TinyLM()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
            "batches": [[micro(2, 0.9), micro(2, 0.1)], [micro(3, 0.5)], [micro(1, 0.0), micro(2, 0.7)]]}


def right(model, optimizer, batches, max_norm=1.0):
    world = len(batches)
    tokens = sum(int((b["labels"] != -100).sum()) for rank in batches for b in rank)       # all_reduce(SUM)
    params = [p for p in model.parameters() if p.requires_grad]
    mean = [torch.zeros_like(p) for p in params]
    for rank in batches:
        optimizer.zero_grad()
        for b in rank:
            total = F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), ignore_index=-100, reduction="sum")
            (total / tokens * world).backward()
        for m, p in zip(mean, params):
            m += p.grad / world                                                              # all_reduce(AVG)
    for m, p in zip(mean, params):
        p.grad = m
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    optimizer.step()


if __name__ == "__main__":
    d = make(0); big = copy.deepcopy(d["model"]); before = copy.deepcopy(big); right(**d)
    ids = torch.cat([b["ids"] for r in d["batches"] for b in r]); labels = torch.cat([b["labels"] for r in d["batches"] for b in r])
    F.cross_entropy(big(ids).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    torch.nn.utils.clip_grad_norm_(big.parameters(), 1.0); torch.optim.SGD(big.parameters(), lr=0.5).step()
    diff = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), big.parameters()))
    moved = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), before.parameters()))
    print("difference to the big batch", diff, "moved by", moved); assert diff < 1e-6 < moved
