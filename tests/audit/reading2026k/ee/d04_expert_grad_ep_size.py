"""Expert gradients ep_size times too large under FSDP with expert parallelism. NVIDIA/Megatron-LM#5956, https://github.com/NVIDIA/Megatron-LM/pull/5956, 2026.
A rank's experts process the tokens of all ranks of its expert-parallel group, so their gradient already is a sum over ep_size ranks'
data. It was then averaged over the expert-data-parallel group only (world / ep_size ranks), as if each rank had contributed
its own data, so expert gradients came out ep_size times too large; dense parameters were unaffected. Fixed with a gradient divisor of ep_size."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny mixture-of-experts language model (ids -> logits); the parameters whose name starts with 'experts' are sharded over the expert-parallel group",
          "optimizer": "torch optimizer over its parameters", "batches": "one dict per rank for this one optimizer step: ids [rows, time]"}
SETTINGS = {"ep_size": "size of an expert-parallel group, 2 (ranks 0,1 are the first group, 2,3 the second)"}
NOTES = ("one optimizer step per call; the gradient of every parameter, expert or not, is the mean over ranks of the gradient of the rank's mean next-token "
         "cross-entropy (equal tokens on every rank: the mean over all tokens); no clipping; plain SGD. The number of ranks must be a multiple of ep_size. "
         "No auxiliary router loss.")


class Moe(torch.nn.Module):
    def __init__(self, vocab=32, width=12, experts=4):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.router = torch.nn.Linear(width, experts)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(experts))
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        gate, which = self.router(h).softmax(-1).topk(2, dim=-1)
        weight = torch.zeros(*h.shape[:-1], len(self.experts)).scatter(-1, which, gate / gate.sum(-1, keepdim=True))
        return self.head(h + sum(weight[..., e:e + 1] * torch.tanh(f(h)) for e, f in enumerate(self.experts)))


def make(seed):
    torch.manual_seed(seed)
    model = Moe()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
            "batches": [{"ids": torch.randint(0, 32, (2, 9))} for _ in range(4)]}


def rank_grads(model, batch):
    ids = batch["ids"]
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    names = [n for n, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters()))))


def run(model, optimizer, batches, ep_size, divisor):
    per_rank = [rank_grads(model, b) for b in batches]
    for name, p in model.named_parameters():
        g = [r[name] for r in per_rank]
        if name.startswith("experts"):
            # the all-to-all brings the group's tokens to the expert: sum within the group
            groups = [sum(g[i:i + ep_size]) / divisor for i in range(0, len(g), ep_size)]
            p.grad = torch.stack(groups).mean(0)        # ReduceOp.AVG over the expert-data-parallel mesh
        else:
            p.grad = torch.stack(g).mean(0)             # ReduceOp.AVG over the data-parallel mesh
    optimizer.step()
    optimizer.zero_grad()


def broken(model, optimizer, batches, ep_size=2):
    run(model, optimizer, batches, ep_size, divisor=1)


def right(model, optimizer, batches, ep_size=2):
    run(model, optimizer, batches, ep_size, divisor=ep_size)


if __name__ == "__main__":
    out = []
    for fn in (broken, right):
        case = make(0)
        before = {n: p.detach().clone() for n, p in case["model"].named_parameters()}
        fn(**case)
        out.append({n: p.detach() - before[n] for n, p in case["model"].named_parameters()})
    case = make(0)
    ids = torch.cat([b["ids"] for b in case["batches"]])
    loss = F.cross_entropy(case["model"](ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    ref = dict(zip(out[0], torch.autograd.grad(loss, list(case["model"].parameters()))))
    for n in ref:
        print(n, "broken / reference", (out[0][n].norm() / (0.5 * ref[n].norm())).item())
        assert torch.allclose(out[1][n], -0.5 * ref[n], atol=1e-6)
