"""Each rank multiplies its loss by the world size and divides by the token count of all ranks and all micro-batches. DDP averages gradients over ranks, so the factor W undoes that mean and leaves the true global token mean (transformers' num_items_in_batch with average_tokens_across_devices). The micro-batch loss is not divided by the number of accumulation steps."""
FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "list over ranks of lists of micro-batches; a micro-batch is a dict of ids [rows, time] and labels [rows, time] (unshifted, -100 untrained)"}
SETTINGS = {"max_norm": "gradient clipping after averaging, 1.0"}
NOTES = "Ranks are simulated in one process by summing rank gradients and dividing by W. One optimizer step per call. Result equals one step on the mean over all trained tokens. Ranks may have different numbers of micro-batches and a rank may have no trained token. The optimizer is cleared at the start."
import copy
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_len=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        """ids [B, T]; positions [B, T]; mask [B, T, T], True where query may see key. Returns logits [B, T, V]."""
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T).expand(B, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out(a @ v)
        return self.head(torch.tanh(x))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = TinyLM()
    batches = []
    for r in range(3):
        micro = []
        for k in range(2):
            ids = torch.randint(1, 32, (2, 10), generator=g)
            labels = ids.clone()
            labels[:, :1 + 3 * r + k] = -100
            micro.append({"ids": ids, "labels": labels})
        batches.append(micro)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def nll_sum(model, mb):
    return nn.functional.cross_entropy(model(mb["ids"])[:, :-1].flatten(0, 1), mb["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")


def right(model, optimizer, batches, max_norm=1.0):
    W = len(batches)
    n_global = sum(int((mb["labels"][:, 1:] != -100).sum()) for rank in batches for mb in rank)      # all_reduce(SUM)
    params = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in params]
    for rank in batches:
        optimizer.zero_grad()
        for mb in rank:
            (nll_sum(model, mb) * W / max(n_global, 1)).backward()
        for t, p in zip(total, params):
            if p.grad is not None:
                t += p.grad
    for t, p in zip(total, params):
        p.grad = t / W                                   # DDP's average
    nn.utils.clip_grad_norm_(params, max_norm)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    b = make(0)
    m = b["model"]
    start, ref = copy.deepcopy(m), copy.deepcopy(m)
    right(**b)
    opt = torch.optim.SGD(ref.parameters(), lr=0.5)
    ids = torch.cat([x["ids"] for r in b["batches"] for x in r])
    lab = torch.cat([x["labels"] for r in b["batches"] for x in r])
    loss = nll_sum(ref, {"ids": ids, "labels": lab}) / (lab[:, 1:] != -100).sum()
    loss.backward()
    nn.utils.clip_grad_norm_(ref.parameters(), 1.0)
    opt.step()
    gap = max((p - q).abs().max().item() for p, q in zip(m.parameters(), ref.parameters()))
    moved = max((p - q).abs().max().item() for p, q in zip(m.parameters(), start.parameters()))
    print("loss", loss.item(), "gap", gap, "moved", moved)
    assert gap < 1e-5 and moved > 1e-3
