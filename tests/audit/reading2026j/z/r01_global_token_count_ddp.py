"""Accumulation over ranks and micro-batches with one global token count. Each micro-batch's SUM of token losses is multiplied
by the number of ranks and divided by the count of trained tokens of all micro-batches of all ranks, because DDP later averages
the gradients over ranks (Hugging Face Trainer, num_items_in_batch with average_tokens_across_devices). No division by the number of micro-batches is due."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "sft and pre-training losses"
KIND = "update"
INPUTS = {"model": "tiny causal model, ids [rows, time] -> logits", "optimizer": "SGD over all parameters",
          "batches": "list over ranks of lists over micro-batches of dicts: ids [rows, time], labels [rows, time] (not shifted, -100 = not trained)"}
SETTINGS = {"max_norm": "gradient clip by global norm, 1.0, after the average over ranks"}
NOTES = ("Update = the gradient of the mean over all trained tokens of all ranks and micro-batches. world = len(batches) is real, not a constant; "
         "any number of ranks and micro-batches works; a micro-batch without trained tokens adds exactly zero. All parameters are used.")

class LM(nn.Module):
    def __init__(self, V=23, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.head = nn.Linear(d, V)
    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed)
    model = LM(); batches = []
    for r in range(2):
        micro = []
        for m in range(3):
            ids = torch.randint(0, 23, (2, 5 + r + 2 * m))
            labels = ids.clone(); labels[:, : 1 + m] = -100
            if r == 1 and m == 0: labels[:] = -100        # a micro-batch with nothing to train on
            micro.append({"ids": ids, "labels": labels})
        batches.append(micro)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}

def right(model, optimizer, batches, max_norm=1.0):
    world = len(batches)
    num_items = sum(int((b["labels"][:, 1:] != -100).sum()) for rank in batches for b in rank)   # the all-reduced count
    optimizer.zero_grad(set_to_none=True)
    if num_items == 0:
        return
    for rank in batches:                                   # in life: one process each
        for b in rank:
            logits = model(b["ids"])[:, :-1].float()
            s = F.cross_entropy(logits.flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")
            (s * world / num_items).backward()
    for p in model.parameters():                           # what DDP does: the average over ranks
        p.grad.div_(world)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()

if __name__ == "__main__":
    import copy
    d = make(0); twin = copy.deepcopy(d["model"]); before = [p.detach().clone() for p in twin.parameters()]
    right(d["model"], d["optimizer"], d["batches"])
    tot, n = 0.0, 0
    for rank in d["batches"]:
        for b in rank:
            lp = twin(b["ids"]).log_softmax(-1)
            for i in range(len(lp)):
                for t in range(lp.shape[1] - 1):
                    y = int(b["labels"][i, t + 1])
                    if y >= 0: tot = tot - lp[i, t, y]; n += 1
    (tot / n).backward(); torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    with torch.no_grad():
        for p in twin.parameters(): p -= 0.5 * p.grad
    err = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), twin.parameters()))
    moved = sum((a - b).abs().sum().item() for a, b in zip(twin.parameters(), before))
    print("max difference", err, "moved", moved, "tokens", n); assert err < 1e-6 and moved > 0
