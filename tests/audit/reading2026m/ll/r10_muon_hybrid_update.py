"""Muon with AdamW for the rest (Keller Jordan 2024; Moonlight, arXiv 2502.16982). The Newton-Schulz coefficients (3.4445, -4.7750, 2.0315) do not converge: five steps leave singular values between about 0.7 and 1.2 on purpose. The size of the update
does not depend on the size of the gradient, tall matrices are transposed, and the momentum is not divided by (1-beta)."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "updates (accumulation, clipping, optimizers)"
KIND = "update"
INPUTS = {"model": "embedding, two hidden matrices without bias, head", "optimizer": "pair (Muon over the hidden matrices, AdamW over embedding and head)",
          "batches": "list of micro-batches of one step, each a dict ids [rows, time]; equal sizes"}
SETTINGS = {}
NOTES = """One update from several equally large micro-batches: the objective is the mean over the micro-batches of the next-token cross-entropy (mean over all targets). No clipping. Embedding and head: AdamW. Hidden matrices W [m, n]: Muon with
momentum beta: buf = beta*buf + g; u = g + beta*buf (Nesterov; the buffer is a plain sum, not an average); O = five Newton-Schulz steps X <- a X + (b XX^T + c (XX^T)^2) X with (a,b,c) = (3.4445, -4.7750, 2.0315) from u/||u||_F, done on the
transposed matrix when m > n; O has the singular vectors of u and singular values roughly between 0.6 and 1.3 (not exactly 1, intended). W <- W*(1 - lr*wd) - lr*0.2*sqrt(max(m, n))*O (RMS matched to AdamW). The update does not depend on the scale of the gradient."""


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                u = p.grad.add(buf, alpha=group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(newton_schulz(u), alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


class LM(nn.Module):
    def __init__(self, vocab=23, width=12):
        super().__init__()
        self.emb, self.up, self.down, self.head = nn.Embedding(vocab, width), nn.Linear(width, 20, bias=False), nn.Linear(20, width, bias=False), nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def make(seed):
    torch.manual_seed(seed)
    m = LM()
    hidden = [m.up.weight, m.down.weight]
    rest = [p for p in m.parameters() if all(p is not h for h in hidden)]
    return {"model": m, "optimizer": (Muon(hidden), torch.optim.AdamW(rest, lr=4e-3)), "batches": [{"ids": torch.randint(0, 23, (4, 9))} for _ in range(3)]}


def right(model, optimizer, batches):
    for o in optimizer:
        o.zero_grad(set_to_none=True)
    for b in batches:
        loss = F.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())
        (loss / len(batches)).backward()
    for o in optimizer:
        o.step()
    for o in optimizer:
        o.zero_grad(set_to_none=True)


if __name__ == "__main__":
    for scale in (1.0, 100.0):
        i = make(0); m = i["model"]
        if scale != 1.0:
            for h in (m.up.weight, m.down.weight):
                h.register_hook(lambda g: g * scale)
        b4 = m.up.weight.detach().clone(), m.down.weight.detach().clone()
        loss = sum(F.cross_entropy(m(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten()) for b in i["batches"]) / 3
        grads = torch.autograd.grad(loss, [m.up.weight, m.down.weight])
        right(**i)
        for w, old, g in zip((m.up.weight, m.down.weight), b4, grads):
            o = (old * (1 - 0.002) - w.detach()) / (0.02 * 0.2 * 20 ** 0.5)
            u, s, vt = torch.linalg.svd(g, full_matrices=False)
            d = u.T @ o @ vt.T
            print("gradient x", scale, tuple(w.shape), "singular values of the update", round(float(d.diag().min()), 3), round(float(d.diag().max()), 3), "off-diagonal", round(float((d - d.diag().diag()).abs().max()), 4))
