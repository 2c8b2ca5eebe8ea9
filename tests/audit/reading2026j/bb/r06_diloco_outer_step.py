"""DiLoCo (Douillard et al. 2023): ranks train apart for H steps; then the weight DIFFERENCE old - new, averaged over ranks, is put into .grad
and an outer Nesterov SGD steps on it from the OLD weights. There is no all-reduce of gradients at all, the optimizer is given a
'gradient' that no backward produced, and inner optimizer states are never averaged."""
import copy
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny language model, the shared (global) weights", "optimizer": "OUTER optimizer over the model: SGD, lr 0.7, Nesterov momentum 0.9",
          "batches": "list over ranks of lists over H inner steps; each is a dict with ids [rows, time]"}
SETTINGS = {"inner_lr": "inner AdamW learning rate, 0.01"}
NOTES = ("One outer round. Each rank starts from the global weights with its own fresh AdamW (here one round only; in a long run the inner states are kept per rank). "
         "Inner loss: mean over all next tokens. The outer gradient is mean over ranks of (old - new): its sign is such that descent moves towards the ranks' mean. "
         "With outer lr 1 and no momentum it would be plain federated averaging. Any number of ranks; every rank the same number of inner steps. "
         "Ranks weigh the same, whatever their token counts.")


class LM(torch.nn.Module):
    def __init__(self, vocab=19, width=10):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.rnn = torch.nn.GRU(width, width, batch_first=True)
        self.out = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = LM()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return {"model": model, "optimizer": outer,
            "batches": [[{"ids": torch.randint(0, 19, (4, 9), generator=g)} for _ in range(3)] for _ in range(2)]}


def right(model, optimizer, batches, inner_lr=0.01):
    world = len(batches)
    delta = [torch.zeros_like(p) for p in model.parameters()]
    for rank in batches:
        local = copy.deepcopy(model)
        inner = torch.optim.AdamW(local.parameters(), lr=inner_lr)
        for b in rank:
            inner.zero_grad(set_to_none=True)
            F.cross_entropy(local(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten()).backward()
            inner.step()
        for d, old, new in zip(delta, model.parameters(), local.parameters()):
            d += (old.detach() - new.detach()) / world
    for p, d in zip(model.parameters(), delta):
        p.grad = d                                            # a pseudo-gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    for seed in range(2):
        d = make(seed)
        model = d["model"]
        momentum = [torch.zeros_like(p) for p in model.parameters()]
        for rnd in range(3):                                   # the same batches thrice: momentum matters from round 2 on
            start = copy.deepcopy(model)
            expect = []
            ends = []
            for rank in d["batches"]:
                local = copy.deepcopy(start)
                opt = torch.optim.AdamW(local.parameters(), lr=0.01)
                for b in rank:
                    opt.zero_grad()
                    lp = local(b["ids"][:, :-1]).log_softmax(-1)
                    (-lp.gather(-1, b["ids"][:, 1:, None]).mean()).backward()
                    opt.step()
                ends.append([p.detach() for p in local.parameters()])
            for j, p in enumerate(start.parameters()):
                g = p.detach() - torch.stack([e[j] for e in ends]).mean(0)
                momentum[j] = 0.9 * momentum[j] + g
                expect.append(p.detach() - 0.7 * (g + 0.9 * momentum[j]))
            loss = lambda m: sum(F.cross_entropy(m(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten()).item() for r in d["batches"] for b in r) / 6
            before = loss(model)
            right(**d)
            err = max((p - e).abs().max().item() for p, e in zip(model.parameters(), expect))
            print(f"round {rnd} error {err:.1e} loss {before:.4f} -> {loss(model):.4f}")
            assert err < 1e-5 and loss(model) < before
