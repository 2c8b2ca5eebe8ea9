"""Contrastive loss with a gather without gradient, own embeddings put back, times the number of ranks. GradCache, Tevatron, pytorch-metric-learning, OpenGait and others.
torch.distributed.all_gather gives the embeddings of the other ranks as constants; each rank puts its own embeddings, with graph, in their place, computes the loss of the whole
batch and multiplies it by the world size. Each rank's gradient is only a part, and the averaging of DDP together with the factor gives exactly the gradient of the full batch."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny encoder (features -> embedding)", "optimizer": "SGD over its parameters",
          "batches": "one dict per rank for this one optimizer step: query [rows, features] and passage [rows, features]; row i of the passages belongs to row i of the queries, all others are negatives"}
SETTINGS = {"temperature": "temperature of the softmax over passages, 0.2"}
NOTES = ("one optimizer step per call: InfoNCE with the passages of all ranks as candidates, mean over the queries of all ranks, normalised embeddings; the gradient is that of the single-process loss over the joined batch. "
         "Equal rows on every rank. Negatives depend on all rows, so the loss is not a sum over ranks.")


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    batches = []
    for _ in range(3):
        q = torch.randn(4, 12)
        batches.append({"query": q, "passage": q + 0.5 * torch.randn(4, 12)})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}


def info_nce(q, p, temperature):
    scores = F.normalize(q, dim=-1) @ F.normalize(p, dim=-1).T / temperature
    return F.cross_entropy(scores, torch.arange(len(q)))


def right(model, optimizer, batches, temperature=0.2):
    world = len(batches)
    with torch.no_grad():                                  # all_gather
        gathered = [(model(b["query"]), model(b["passage"])) for b in batches]
    optimizer.zero_grad()
    for rank, b in enumerate(batches):
        q = torch.cat([model(b["query"]) if r == rank else gathered[r][0] for r in range(world)])
        p = torch.cat([model(b["passage"]) if r == rank else gathered[r][1] for r in range(world)])
        loss = info_nce(q, p, temperature) * world
        (loss / world).backward()                          # DDP: mean of the gradients over ranks
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    case, twin = make(0), make(0)
    vec = lambda m: torch.cat([p.detach().flatten().clone() for p in m.parameters()])
    before = vec(case["model"])
    right(**case)
    q = torch.cat([b["query"] for b in twin["batches"]])
    p = torch.cat([b["passage"] for b in twin["batches"]])
    info_nce(twin["model"](q), twin["model"](p), 0.2).backward()
    twin["optimizer"].step()
    print("update", (vec(case["model"]) - before).norm().item(), "difference to one process", (vec(case["model"]) - vec(twin["model"])).abs().max().item())
    assert torch.allclose(vec(case["model"]), vec(twin["model"]), atol=1e-6)
