"""Loss multiplied by the number of ranks (HF Trainer average_tokens_across_devices, verl). DDP averages gradients, so each rank scales its token sum by world / global tokens; a rank without trained tokens still takes part with a zero gradient. The local losses look 'world' times too big."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "tiny model", "optimizer": "any torch optimizer", "batches": "one dict per rank: ids [rows, time], loss_mask [rows, time]; rows may differ between ranks"}
SETTINGS = {}
NOTES = "One optimizer step, equal to that of the mean over trained tokens of all ranks. Works with any number of ranks >= 1; at least one trained token in all."
class Tiny(nn.Module):
    """One attention layer and an MLP-free head; position_ids and allowed ([B,T,T] bool) are optional."""
    def __init__(self, vocab=40, width=16, places=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, position_ids=None, allowed=None):
        T = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T).expand_as(ids)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(ids.shape[0], T, T)
        h = self.emb(ids) + self.pos(position_ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        a = s.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(h + self.o(a @ self.v(h)))

def make(seed):
    torch.manual_seed(seed); model = Tiny(); batches = []
    for n, p in ((2, .9), (3, .2), (2, 0.0), (1, .6)):
        mask = (torch.rand(n, 10) < p).float(); mask[:, 0] = 0; mask[:, 3] = float(p > 0)
        batches.append({"ids": torch.randint(0, 40, (n, 10)), "loss_mask": mask})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}

def token_sum(model, b):
    ce = nn.functional.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:], reduction="none")
    return (ce * b["loss_mask"][:, 1:]).sum()

def right(model, optimizer, batches):
    world, params = len(batches), list(model.parameters())
    tokens = sum(b["loss_mask"][:, 1:].sum() for b in batches)                     # all-reduce SUM
    local = [torch.autograd.grad(token_sum(model, b) * world / tokens, params) for b in batches]
    for i, p in enumerate(params):
        p.grad = sum(g[i] for g in local) / world                                  # what DDP does
    optimizer.step(); optimizer.zero_grad()

if __name__ == "__main__":
    import copy
    d = make(0); twin = copy.deepcopy(d["model"]); opt = torch.optim.SGD(twin.parameters(), lr=.5); before = copy.deepcopy(twin)
    right(**d)
    whole = {k: torch.cat([b[k] for b in d["batches"]]) for k in ("ids", "loss_mask")}
    (token_sum(twin, whole) / whole["loss_mask"][:, 1:].sum()).backward(); opt.step()
    e = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), twin.parameters())); moved = max((a - b).abs().max().item() for a, b in zip(twin.parameters(), before.parameters()))
    print("error", e, "moved", moved); assert e < 1e-6 < moved
