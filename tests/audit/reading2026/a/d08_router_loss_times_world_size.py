"""Router auxiliary loss multiplied by the number of ranks. huggingface/transformers#48690,
https://github.com/huggingface/transformers/issues/48690, 2026. With average_tokens_across_devices the cross entropy is a
local sum over the global token count, so Trainer multiplies the loss by the world size to undo DDP's averaging. The
model had already added its router loss, a local mean, to that scalar: its weight grows with the number of ranks."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "tiny mixture-of-experts language model; returns logits and router logits",
          "optimizer": "SGD over all parameters",
          "batches": "one dict per data-parallel rank: 'ids' and 'labels' [rows, time], labels -100 where not trained"}
SETTINGS = {"aux_coef": "weight of the load-balancing loss, 0.1"}
NOTES = ("One optimizer step. Ranks are simulated; DDP averages their gradients. Objective: cross entropy as a mean over the "
         "trained tokens of all ranks, plus aux_coef times the mean over ranks of the local load-balancing loss.")

class TinyMoE(nn.Module):
    def __init__(self, vocab=32, dim=16, experts=4):
        super().__init__()
        self.emb, self.router = nn.Embedding(vocab, dim), nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        x = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[None, :, None]
        router = self.router(x)
        weights, chosen = router.softmax(-1).topk(2, -1)
        y = torch.stack([e(x) for e in self.experts], -2)
        y = (y.gather(-2, chosen[..., None].expand(*chosen.shape, y.shape[-1])) * weights[..., None]).sum(-2)
        return self.head(x + y), router

def load_balancing_loss(router, top_k=2):
    probs = router.flatten(0, -2).softmax(-1)
    experts = probs.shape[-1]
    share = F.one_hot(probs.topk(top_k, -1).indices, experts).float().sum(1).mean(0)
    return experts * (share * probs.mean(0)).sum()

def make(seed):
    torch.manual_seed(seed)
    model = TinyMoE()
    batches = []
    for rank in range(4):
        ids = torch.randint(0, 32, (2, 12))
        labels = ids.clone()
        labels[:, :3 + 2 * rank] = -100
        batches.append({"ids": ids, "labels": labels})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}

def _local(model, batch, num_items):
    logits, router = model(batch["ids"])
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return ce / num_items, load_balancing_loss(router)

def broken(model, optimizer, batches, aux_coef=0.1):
    world = len(batches)
    num_items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    optimizer.zero_grad()
    for batch in batches:                              # each pass is one rank; / world is DDP's average
        ce, aux = _local(model, batch, num_items)
        loss = ce + aux_coef * aux
        loss = loss * world
        (loss / world).backward()
    optimizer.step()

def right(model, optimizer, batches, aux_coef=0.1):
    world = len(batches)
    num_items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    optimizer.zero_grad()
    for batch in batches:
        ce, aux = _local(model, batch, num_items)
        loss = ce * world + aux_coef * aux
        (loss / world).backward()
    optimizer.step()

if __name__ == "__main__":
    a, b = make(0), make(0)
    start = [p.detach().clone() for p in a["model"].parameters()]
    broken(**a)
    right(**b)
    moves = [(pa - s, pb - s) for pa, pb, s in zip(a["model"].parameters(), b["model"].parameters(), start)]
    router = [n for n, _ in a["model"].named_parameters()].index("router.weight")
    print("router step", moves[router][0].norm().item(), moves[router][1].norm().item())
    print("head step", moves[-1][0].norm().item(), moves[-1][1].norm().item())
    assert (moves[router][0] - moves[router][1]).norm() > 1e-4
