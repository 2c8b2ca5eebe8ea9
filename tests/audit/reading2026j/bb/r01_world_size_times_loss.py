"""Loss multiplied by the number of ranks before DDP averages it. Each rank divides its summed token loss by the token count
of ALL ranks and all accumulation steps, then multiplies by the world size, because DDP takes the mean (not the sum) of the
ranks' gradients (HF Trainer `average_tokens_across_devices`, torchtitan, Megatron). Result: an exact mean over all trained tokens."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny language model, ids -> logits",
          "optimizer": "SGD over the model's parameters",
          "batches": "list over ranks of lists over micro-batches; each is a dict: ids [rows, time], labels [rows, time] (already shifted, -100 where not trained)"}
SETTINGS = {}
NOTES = ("One optimizer step. Reduction: mean over the trained tokens of all ranks and all micro-batches. The factor world_size cancels the "
         "division by world_size in the simulated DDP mean. Any number of ranks, rows and micro-batches (may differ per rank, at least one each); "
         "a micro-batch without trained tokens is legal and adds 0. Not legal: no trained token anywhere (the count is clamped to 1).")


class LM(torch.nn.Module):
    def __init__(self, vocab=23, width=12):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.rnn = torch.nn.GRU(width, width, batch_first=True)
        self.out = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = LM()
    batches = []
    for rank in range(3):
        micro = []
        for _ in range(2):
            rows = int(torch.randint(1, 4, (1,), generator=g))
            ids = torch.randint(0, 23, (rows, 8), generator=g)
            labels = torch.cat([ids[:, 1:], torch.full((rows, 1), -100)], 1)
            labels = labels.masked_fill(torch.rand(rows, 8, generator=g) < 0.2 + 0.2 * rank, -100)
            micro.append({"ids": ids, "labels": labels})
        batches.append(micro)
    batches[0][0]["labels"][0, 0] = 1
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}


def right(model, optimizer, batches):
    world = len(batches)
    # all-reduce(SUM) of the label counts, before the first backward
    count = sum((mb["labels"] != -100).sum() for rank in batches for mb in rank).clamp(min=1)
    params = list(model.parameters())
    reduced = [torch.zeros_like(p) for p in params]
    for rank in batches:                                    # each rank in its own process in reality
        optimizer.zero_grad(set_to_none=True)
        for mb in rank:                                     # no_sync accumulation: .grad adds up
            logits = model(mb["ids"])
            total = F.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), ignore_index=-100, reduction="sum")
            (total * world / count).backward()
        for r, p in zip(reduced, params):
            r += p.grad / world                             # DDP: all-reduce(MEAN)
    for r, p in zip(reduced, params):
        p.grad = r
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        ref = copy.deepcopy(d["model"])
        before = [p.clone() for p in d["model"].parameters()]
        right(**d)
        nll, n = 0.0, 0
        for rank in d["batches"]:
            for mb in rank:
                lp = ref(mb["ids"]).log_softmax(-1)
                for i in range(lp.shape[0]):
                    for t in range(lp.shape[1]):
                        y = int(mb["labels"][i, t])
                        if y >= 0:
                            nll, n = nll - lp[i, t, y], n + 1
        (nll / n).backward()
        err = max((p - (q - 0.1 * q.grad)).abs().max().item() for p, q in zip(d["model"].parameters(), ref.parameters()))
        moved = max((p - b).abs().max().item() for p, b in zip(d["model"].parameters(), before))
        print(f"tokens {n}, moved {moved:.4f}, error against one big batch {err:.1e}")
        assert err < 1e-6 and moved > 1e-4
