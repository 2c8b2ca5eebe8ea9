"""Pipeline stages re-initialized between micro-batches drop the accumulated gradients. NVIDIA-NeMo/Automodel#3530, https://github.com/NVIDIA-NeMo/Automodel/pull/3530, 2026.
When the sequence length changes, the pipeline stages are initialized anew for the new shapes, and the initialization ends with
a clean-up that sets param.grad = None. With gradient accumulation and variable lengths this lands between micro-batches,
so only the micro-batches since the last change of length trained the model. The loss was summed apart and looked fine."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny language model (ids -> logits)", "optimizer": "torch optimizer over its parameters",
          "batches": "the micro-batches of one optimizer step, each a dict with ids [rows, time]; the lengths differ between micro-batches"}
SETTINGS = {}
NOTES = ("one optimizer step per call over all micro-batches; loss = next-token cross-entropy summed over all targets, divided by "
         "the number of targets of all micro-batches of the step (a mean over all tokens); no clipping; plain SGD; the order of the micro-batches does not matter.")


class Tiny(torch.nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mid = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + torch.tanh(self.mid(h)))


class Stages:
    """Keeps the shapes that the pipeline stages were initialized for."""

    def __init__(self, model):
        self.model, self.length = model, None

    def initialize(self, length, keep_grads):
        kept = [p.grad for p in self.model.parameters()]
        self.length = length
        for p in self.model.parameters():        # clean-up after the inference of the shapes
            p.grad = None
        if keep_grads:
            for p, g in zip(self.model.parameters(), kept):
                p.grad = g


def make(seed):
    torch.manual_seed(seed)
    model = Tiny()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
            "batches": [{"ids": torch.randint(0, 32, (2, n))} for n in (6, 6, 9, 7)]}


def run(model, optimizer, batches, keep_grads):
    stages = Stages(model)
    total = sum(b["ids"][:, 1:].numel() for b in batches)
    optimizer.zero_grad()
    for b in batches:
        ids = b["ids"]
        if stages.length != ids.shape[1]:
            stages.initialize(ids.shape[1], keep_grads)
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / total
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def broken(model, optimizer, batches):
    run(model, optimizer, batches, keep_grads=False)


def right(model, optimizer, batches):
    run(model, optimizer, batches, keep_grads=True)


if __name__ == "__main__":
    vec = lambda m: torch.cat([p.detach().flatten().clone() for p in m.parameters()])
    out = []
    for fn in (broken, right):
        case = make(0)
        before = vec(case["model"])
        fn(**case)
        out.append(vec(case["model"]) - before)
    print("length of the update: broken", out[0].norm().item(), "right", out[1].norm().item())
    case = make(0)
    total = sum(b["ids"][:, 1:].numel() for b in case["batches"])
    loss = sum(F.cross_entropy(case["model"](b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten(), reduction="sum") for b in case["batches"]) / total
    ref = -0.5 * torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(case["model"].parameters()))])
    assert torch.allclose(out[1], ref, atol=1e-6) and not torch.allclose(out[0], ref, atol=1e-4)
