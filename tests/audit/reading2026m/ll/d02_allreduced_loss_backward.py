"""Backward on the all-reduced loss: gradients are smaller by the number of ranks. verl-project/verl-SpeCo#29,
https://github.com/verl-project/verl-SpeCo/pull/29, 2026. The drafter trainer summed the loss and the token count over the ranks,
divided one by the other and called backward on that value. The all-reduce has no autograd, so each rank's graph holds only its own
share divided by the global count; the gradient mean over the ranks that follows divides by the world size once more, so W ranks train
with lr / W. Gradient clipping hides it early in training."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {
    "model": "a draft head: hidden state [n, width] -> logits over the vocabulary",
    "optimizer": "SGD over the parameters of the model",
    "batches": "one dict per data-parallel rank (4 ranks): hidden [rows, time, width] float, targets [rows, time] ids, mask [rows, time] 1 where the token is trained; "
               "the numbers of trained tokens differ between the ranks",
}
SETTINGS = {"max_norm": "clipping threshold of the synchronised gradient, 5.0 (rarely reached)"}
VALUES = {"max_norm": 5.0}
NOTES = """One optimizer step of data-parallel training, simulated in one process. Every rank runs forward and backward on its own batch;
the engine then takes the MEAN of the ranks' gradients (as FSDP / DDP does), clips the global L2 norm of the result to max_norm and
steps. Objective: cross-entropy averaged over all trained tokens of all ranks (each trained token counts the same, wherever it is),
so the update is the one that a single process would make on the concatenated batch, for any number of ranks. Targets belong to the
same position as the hidden state (already shifted). Collective sums carry no autograd. A rank without trained tokens is allowed as
long as one rank has some. The optimizer starts with empty gradients and is left with none."""


def make(seed):
    torch.manual_seed(seed)
    width, vocab = 8, 17
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, vocab))
    batches = []
    for keep in (0.9, 0.3, 0.6, 0.2):
        mask = (torch.rand(2, 7) < keep).long()
        mask[0, 0] = 1
        batches.append({"hidden": torch.randn(2, 7, width), "targets": torch.randint(0, vocab, (2, 7)), "mask": mask})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def _local(model, b):
    nll = F.cross_entropy(model(b["hidden"]).flatten(0, 1), b["targets"].flatten(), reduction="none")
    return (nll * b["mask"].flatten()).sum(), b["mask"].sum()


def _all_reduce_sum(values, rank):
    """The value that `rank` holds after an all-reduce: the sum; only its own term stays in its graph."""
    return values[rank] + sum(v.detach() for r, v in enumerate(values) if r != rank)


def _step(model, optimizer, rank_grads, max_norm):
    for p, *gs in zip(model.parameters(), *rank_grads):
        p.grad = torch.stack(gs).mean(0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def broken(model, optimizer, batches, max_norm=5.0):
    local = [_local(model, b) for b in batches]
    tokens = sum(n for _, n in local)
    grads = []
    for rank in range(len(batches)):
        loss = _all_reduce_sum([s for s, _ in local], rank) / tokens
        grads.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
    _step(model, optimizer, grads, max_norm)


def right(model, optimizer, batches, max_norm=5.0):
    local = [_local(model, b) for b in batches]
    tokens = sum(n for _, n in local)
    grads = []
    for rank in range(len(batches)):
        loss = local[rank][0] * (len(batches) / tokens)
        grads.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
    _step(model, optimizer, grads, max_norm)


if __name__ == "__main__":
    out = {}
    for f in (broken, right):
        i = make(0)
        before = copy.deepcopy(i["model"].state_dict())
        f(**i, **VALUES)
        out[f.__name__] = torch.cat([(v - before[k]).flatten() for k, v in i["model"].state_dict().items()])
    i = make(0)
    before = copy.deepcopy(i["model"].state_dict())
    cat = {k: torch.cat([b[k] for b in i["batches"]]) for k in i["batches"][0]}
    s, n = _local(i["model"], cat)
    (s / n).backward(); torch.nn.utils.clip_grad_norm_(i["model"].parameters(), 5.0); i["optimizer"].step()
    single = torch.cat([(v - before[k]).flatten() for k, v in i["model"].state_dict().items()])
    print("right == one process", bool(torch.allclose(out["right"], single, atol=1e-6)),
          "| |broken| / |right| =", float(out["broken"].norm() / out["right"].norm()))
