"""Gradient norm under HSDP summed over the full FSDP group instead of one shard group. ByteDance-Seed/VeOmni#862, https://github.com/ByteDance-Seed/VeOmni/pull/862, 2026.
Under hybrid sharding (parameters sharded over dp_shard, replicated over dp_replicate) the squared norms of the local
shards were summed over all ranks. Each shard exists once per replica, so the squared norm was counted dp_replicate times;
the norm came out sqrt(dp_replicate) too large and clipping was stronger than max_norm says. Nothing failed."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny language model (ids -> logits)", "optimizer": "torch optimizer over its parameters",
          "batches": "one dict per rank for this one optimizer step: ids [rows, time] (every position but the first is a target)"}
SETTINGS = {"max_norm": "the norm of the averaged gradient of all parameters is clipped to 0.25", "replicas": "2 replicas of the sharded model; ranks = replicas * shards"}
NOTES = ("one optimizer step per call; gradient = mean over all ranks of the gradient of the rank's mean next-token cross-entropy "
         "(all ranks have the same number of tokens, so it is the mean over all tokens); then global L2 clipping by max_norm as "
         "torch.nn.utils.clip_grad_norm_ does; then optimizer.step(). The number of ranks must be a multiple of replicas. Plain SGD.")


class Tiny(torch.nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mid = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + torch.tanh(self.mid(h)))


def make(seed):
    torch.manual_seed(seed)
    model = Tiny()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3),
            "batches": [{"ids": torch.randint(0, 32, (2, 8))} for _ in range(4)]}


def rank_grads(model, batch):
    logits = model(batch["ids"])[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())
    return torch.autograd.grad(loss, list(model.parameters()))


def averaged_flat(model, batches):
    per_rank = [torch.cat([g.flatten() for g in rank_grads(model, b)]) for b in batches]
    return torch.stack(per_rank).mean(0)


def clip_and_step(model, optimizer, flat, norm, max_norm):
    flat = flat * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    at = 0
    for p in model.parameters():
        p.grad = flat[at:at + p.numel()].view_as(p).clone()
        at += p.numel()
    optimizer.step()
    optimizer.zero_grad()


def broken(model, optimizer, batches, max_norm=0.25, replicas=2):
    flat = averaged_flat(model, batches)
    shards = flat.chunk(len(batches) // replicas)
    local = [shards[rank % len(shards)].pow(2).sum() for rank in range(len(batches))]  # what each rank holds
    norm = torch.stack(local).sum().sqrt()                                             # all_reduce over the fsdp group
    clip_and_step(model, optimizer, flat, norm, max_norm)


def right(model, optimizer, batches, max_norm=0.25, replicas=2):
    flat = averaged_flat(model, batches)
    shards = flat.chunk(len(batches) // replicas)
    local = [shards[rank % len(shards)].pow(2).sum() for rank in range(len(batches))]
    norm = torch.stack(local[:len(shards)]).sum().sqrt()                               # all_reduce over dp_shard only
    clip_and_step(model, optimizer, flat, norm, max_norm)


if __name__ == "__main__":
    out = []
    for fn in (broken, right):
        case = make(0)
        before = torch.cat([p.detach().flatten().clone() for p in case["model"].parameters()])
        fn(**case)
        out.append(torch.cat([p.detach().flatten() for p in case["model"].parameters()]) - before)
    print("length of the update / lr: broken", (out[0].norm() / 0.3).item(), "right", (out[1].norm() / 0.3).item())
    case = make(0)
    ids = torch.cat([b["ids"] for b in case["batches"]])
    F.cross_entropy(case["model"](ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    before = torch.cat([p.detach().flatten().clone() for p in case["model"].parameters()])
    torch.nn.utils.clip_grad_norm_(case["model"].parameters(), 0.25)
    case["optimizer"].step()
    ref = torch.cat([p.detach().flatten() for p in case["model"].parameters()]) - before
    assert torch.allclose(out[1], ref, atol=1e-6) and not torch.allclose(out[0], ref, atol=1e-4)
