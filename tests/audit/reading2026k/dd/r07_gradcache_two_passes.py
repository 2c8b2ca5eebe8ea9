"""GradCache (Gao et al. 2021, arXiv:2101.06983; sentence-transformers Cached*Loss). A large contrastive batch in small
memory: all texts are embedded WITHOUT a graph, the loss is differentiated only with respect to the embeddings, and in a
second pass each chunk is embedded again with a graph and the scalar (embedding * cached gradient).sum() is backpropagated.
The first forward has no gradient, the backpropagated scalars are not the loss, and nothing is divided by the number of
chunks - and the step is exactly that of the full batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "embeddings"
KIND = "update"
INPUTS = {"model": "sentence encoder without dropout",
          "optimizer": "SGD without momentum over the model's parameters, learning rate 0.5",
          "batches": "chunks of one large batch: dicts 'anchor' and 'positive', token ids [pairs of the chunk, time]; chunks may differ in size"}
SETTINGS = {"temperature": "InfoNCE temperature, 0.2"}
NOTES = ("One optimizer step. It equals the step of a single batch made of all chunks together: mean over all anchors of the "
         "cross-entropy against all positives of all chunks. So the chunks are coupled and the step is not the mean of the "
         "chunks' own losses. No clipping, no weight decay.")


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
    batches = [{k: torch.randint(1, 24, (n, 5), generator=g) for k in ("anchor", "positive")} for n in (3, 2, 3)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def right(model, optimizer, batches, temperature=0.2):
    with torch.no_grad():
        cached = {k: [model(b[k]) for b in batches] for k in ("anchor", "positive")}
    leaves = {k: [e.detach().requires_grad_() for e in v] for k, v in cached.items()}
    logits = torch.cat(leaves["anchor"]) @ torch.cat(leaves["positive"]).T / temperature
    F.cross_entropy(logits, torch.arange(len(logits))).backward()
    for i, batch in enumerate(batches):
        for k in ("anchor", "positive"):
            (model(batch[k]) * leaves[k][i].grad).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    case, twin = make(0), make(0)
    before = [p.detach().clone() for p in case["model"].parameters()]
    right(case["model"], case["optimizer"], case["batches"])
    a, p = (torch.cat([b[k] for b in twin["batches"]]) for k in ("anchor", "positive"))
    F.cross_entropy(twin["model"](a) @ twin["model"](p).T / 0.2, torch.arange(8)).backward()
    twin["optimizer"].step()
    far = max((x - y).abs().max().item() for x, y in zip(case["model"].parameters(), twin["model"].parameters()))
    moved = sum((x - y).norm().item() for x, y in zip(case["model"].parameters(), before))
    print("largest difference to the full batch", far, "moved", moved)
    assert far < 1e-6 and moved > 1e-3
