"""InfoNCE over gathered embeddings: the gradient is too small by the number of ranks.
modelscope/ms-swift#10081, https://github.com/modelscope/ms-swift/pull/10081, 2026.
Each rank gathers all embeddings and computes the same global mean loss, but keeps the graph only for its own
embeddings. DDP then averages the ranks' gradients, so the parameter gradient is 1/world_size of the full-batch one while
the logged loss agrees exactly."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "embeddings"
KIND = "update"
INPUTS = {"model": "sentence encoder",
          "optimizer": "SGD without momentum over the model's parameters, learning rate 0.5",
          "batches": "one dict per data-parallel rank: 'anchor' and 'positive', token ids [pairs, time]; every rank has equally many pairs"}
SETTINGS = {"temperature": "InfoNCE temperature, 0.2"}
NOTES = ("One optimizer step of data-parallel InfoNCE with negatives gathered over all ranks, simulated in one process: DDP "
         "averages the gradients of the ranks. The step must equal a single-process step on all pairs of all ranks as one "
         "batch: mean over all anchors of the cross-entropy against all positives. No clipping, no weight decay.")


class Encoder(nn.Module):
    def __init__(self, vocabulary=24, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.out = nn.Linear(width, width)

    def forward(self, ids):
        return F.normalize(self.out(torch.tanh(self.embed(ids).mean(1))), dim=-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Encoder()
    batches = [{k: torch.randint(1, 24, (3, 5), generator=g) for k in ("anchor", "positive")} for _ in range(2)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def _rank_loss(model, batches, rank, temperature):
    anchors, positives = [], []
    for other, batch in enumerate(batches):
        with torch.set_grad_enabled(other == rank):
            anchors.append(model(batch["anchor"]))
            positives.append(model(batch["positive"]))
    logits = torch.cat(anchors) @ torch.cat(positives).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits)))


def _ddp_step(model, optimizer, losses):
    total = [torch.zeros_like(p) for p in model.parameters()]
    for loss in losses:
        for t, grad in zip(total, torch.autograd.grad(loss, list(model.parameters()))):
            t += grad
    for p, t in zip(model.parameters(), total):
        p.grad = t / len(losses)
    optimizer.step()
    optimizer.zero_grad()


def broken(model, optimizer, batches, temperature=0.2):
    _ddp_step(model, optimizer, [_rank_loss(model, batches, r, temperature) for r in range(len(batches))])


def right(model, optimizer, batches, temperature=0.2):
    losses = []
    for rank in range(len(batches)):
        loss = _rank_loss(model, batches, rank, temperature)
        losses.append(loss.detach() + len(batches) * (loss - loss.detach()))
    _ddp_step(model, optimizer, losses)


if __name__ == "__main__":
    moved = {}
    for name in ("broken", "right", "single"):
        case = make(0)
        model, before = case["model"], [p.detach().clone() for p in case["model"].parameters()]
        if name == "single":
            whole = {k: torch.cat([b[k] for b in case["batches"]]) for k in ("anchor", "positive")}
            loss = F.cross_entropy(model(whole["anchor"]) @ model(whole["positive"]).T / 0.2, torch.arange(6))
            loss.backward()
            case["optimizer"].step()
        else:
            globals()[name](model, case["optimizer"], case["batches"])
        moved[name] = torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), before)])
        print(name, "length of the step", moved[name].norm().item())
    assert torch.allclose(moved["right"], moved["single"], atol=1e-6) and not torch.allclose(moved["broken"], moved["single"], atol=1e-4)
