"""Muon weight decay computed but never applied. tinygrad/tinygrad#17708, https://github.com/tinygrad/tinygrad/pull/17708, 2026.
The optimizer's inner step was changed from returning the new weight to returning the (orthogonalized) gradient, and an outer loop
does the assignment. The decayed weight was still written to a local variable that nothing reads any more, so weight decay had no
effect in Muon (and LARS). Training runs on, undecayed."""
import torch
import torch.nn.functional as F

FAMILY = "schedules, updates, and saved or cached state"
KIND = "update"
INPUTS = {"model": "tiny module, tokens [rows, time] -> logits [rows, time, vocab]", "batches": "list of dicts with ids [rows, time], one optimizer step each"}
SETTINGS = {"lr": "learning rate, 0.05 (in the param group of the optimizer)", "weight_decay": "decoupled weight decay of Muon, 0.3", "momentum": "0.9"}
NOTES = ("Muon with decoupled weight decay for the matrices: W <- W - lr * (orthogonalized momentum + weight_decay * W). Embedding and all "
         "matrices are treated alike here. Nesterov momentum: buf = momentum * buf + grad, then grad + momentum * buf is orthogonalized by five quintic Newton-Schulz steps. The optimizer is plain torch SGD without momentum that only does p <- p - lr * p.grad. "
         "One update per batch, loss is the mean next-token cross entropy. No clipping, one process.")


class Tiny(torch.nn.Module):
    def __init__(self, v=23, d=12):
        super().__init__()
        self.emb = torch.nn.Embedding(v, d)
        self.mix = torch.nn.Linear(d, d, bias=False)
        self.out = torch.nn.Linear(d, v, bias=False)

    def forward(self, ids):
        return self.out(torch.tanh(self.mix(self.emb(ids).cumsum(1) / 3)))


def make_optimizer(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": Tiny(), "batches": [{"ids": torch.randint(0, 23, (4, 9), generator=g)} for _ in range(4)]}


def _ortho(m, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


def _loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def broken(model, optimizer, batches, weight_decay=0.3, momentum=0.9):
    lr = optimizer.param_groups[0]["lr"]
    for batch in batches:
        optimizer.zero_grad()
        _loss(model, batch["ids"]).backward()
        for p in model.parameters():
            st = optimizer.state[p]
            buf = st.setdefault("muon_buf", torch.zeros_like(p))
            buf.mul_(momentum).add_(p.grad)
            t = p.detach()
            t = t * (1 - lr * weight_decay)
            p.grad = _ortho(p.grad + momentum * buf)
        optimizer.step()


def right(model, optimizer, batches, weight_decay=0.3, momentum=0.9):
    for batch in batches:
        optimizer.zero_grad()
        _loss(model, batch["ids"]).backward()
        for p in model.parameters():
            st = optimizer.state[p]
            buf = st.setdefault("muon_buf", torch.zeros_like(p))
            buf.mul_(momentum).add_(p.grad)
            p.grad = _ortho(p.grad + momentum * buf) + weight_decay * p.detach()
        optimizer.step()


if __name__ == "__main__":
    out = []
    for f in (broken, right):
        c = make(0)
        f(c["model"], make_optimizer(c["model"]), c["batches"])
        out.append(torch.cat([p.detach().flatten() for p in c["model"].parameters()]))
    print("norm broken %.5f right %.5f, max diff %.5f" % (out[0].norm(), out[1].norm(), (out[0] - out[1]).abs().max()))
    assert (out[0] - out[1]).abs().max() > 1e-3 and out[1].norm() < out[0].norm()
