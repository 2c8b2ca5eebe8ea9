"""ReLoRA (Lialin et al. 2023): every `cycle` steps the low-rank product is merged into the FROZEN weight, A is drawn anew, B set to 0, most of the optimizer's moments of A and B are set to 0 (99 % by magnitude of the second moment), and the learning rate warms up again.
The frozen weight does change, the optimizer state is wiped on purpose, and the sum of the merged parts has a rank above r."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "adapters and merged weights"
KIND = "update"
INPUTS = {"model": "tiny causal model with one ReLora layer", "optimizer": "Adam over the trainable parameters, group['base_lr'] set", "batches": "list of {ids [rows, time]}, one optimizer step each"}
SETTINGS = {"cycle": "steps between resets, 4", "warmup": "steps of re-warm-up, 2", "prune": "share of the moments that is set to 0, 0.99", "seed": "seed of the new A's, 0; with the reset's number it fixes the draw"}
NOTES = ("Loss: next-token CE, mean over all targets of the batch. A reset comes after a full cycle and does not change the function (merge, then B = 0). Pruning keeps the entries whose second moment is above the 0.99 quantile of its tensor, with the same mask for the first moment (the authors' code prunes the two apart); Adam's step counter is kept, as the authors' code does. "
         "The moments of the other parameters are untouched. The frozen weight has requires_grad False and changes at resets only. The learning rate is set by this code. All trainable parameters get gradients (A is without one right after a reset, B = 0).")

class ReLora(nn.Module):
    def __init__(self, d, r=2):
        super().__init__(); self.W = nn.Parameter(torch.randn(d, d) * d ** -0.5, requires_grad=False); self.A = nn.Parameter(torch.randn(r, d) * d ** -0.5); self.B = nn.Parameter(torch.zeros(d, r))
    def forward(self, x): return x @ self.W.T + x @ self.A.T @ self.B.T
    @torch.no_grad()
    def merge_and_reset(self, gen):
        self.W += self.B @ self.A
        self.A.copy_(torch.randn(self.A.shape, generator=gen) * self.A.shape[1] ** -0.5); self.B.zero_()

class LM(nn.Module):
    def __init__(self, V=19, d=16):
        super().__init__(); self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.mid = ReLora(d); self.head = nn.Linear(d, V)
    def forward(self, ids): return self.head(torch.tanh(self.mid(self.rnn(self.emb(ids))[0])))

def make(seed):
    torch.manual_seed(seed); m = LM(); opt = torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=1e-2)
    for g in opt.param_groups: g["base_lr"] = g["lr"]
    return {"model": m, "optimizer": opt, "batches": [{"ids": torch.randint(0, 19, (4, 9))} for _ in range(13)]}

def right(model, optimizer, batches, cycle=4, warmup=2, prune=0.99, seed=0):
    layers = [l for l in model.modules() if isinstance(l, ReLora)]
    for step, b in enumerate(batches):
        if step and step % cycle == 0:
            gen = torch.Generator().manual_seed(seed * 1_000_003 + step // cycle)
            for l in layers:
                l.merge_and_reset(gen)
                for p in (l.A, l.B):
                    st = optimizer.state[p]; v = st["exp_avg_sq"]
                    keep = v > torch.quantile(v.flatten(), prune)
                    st["exp_avg"].mul_(keep); v.mul_(keep)              # one mask for both: a first moment without its second would step by m / eps
        for g in optimizer.param_groups: g["lr"] = g["base_lr"] * min(1.0, (step % cycle + 1) / warmup)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten()).backward()
        optimizer.step()

if __name__ == "__main__":
    import copy
    D = make(0); m, opt, bs = D["model"], D["optimizer"], D["batches"]; W0 = m.mid.W.detach().clone(); first = copy.deepcopy(m)
    right(m, opt, bs); dW = (m.mid.W - W0); rank = int(torch.linalg.matrix_rank(dW.double(), tol=1e-6))
    # explicit twin: hand-written Adam
    t = first; P = {n: p for n, p in t.named_parameters() if p.requires_grad}; M = {n: torch.zeros_like(p) for n, p in P.items()}; V = {n: torch.zeros_like(p) for n, p in P.items()}
    same = []
    for step, b in enumerate(bs):
        if step in (4, 8, 12):
            before = t(b["ids"]).detach(); g = torch.Generator().manual_seed(step // 4)
            with torch.no_grad(): t.mid.W += t.mid.B @ t.mid.A; t.mid.A.copy_(torch.randn(2, 16, generator=g) / 4); t.mid.B.zero_()
            same.append((t(b["ids"]) - before).abs().max().item())
            for n in ("mid.A", "mid.B"):
                f = V[n].flatten().tolist(); top = max(range(32), key=lambda i: f[i])   # 32 entries: position 0.99 * 31 = 30.69 -> only the largest one stays
                k = torch.zeros(32); k[top] = 1.0; M[n] *= k.view_as(M[n]); V[n] *= k.view_as(V[n])
        lr = 0.01 * (0.5 if step % 4 == 0 else 1.0); lp = t(b["ids"])[:, :-1].log_softmax(-1); gr = torch.autograd.grad(-lp.gather(-1, b["ids"][:, 1:, None]).mean(), list(P.values()))
        with torch.no_grad():
            for (n, p), g in zip(P.items(), gr):
                M[n] = 0.9 * M[n] + 0.1 * g; V[n] = 0.999 * V[n] + 0.001 * g * g; p -= lr * (M[n] / (1 - 0.9 ** (step + 1))) / ((V[n] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    err = max((a - b).abs().max().item() for a, b in zip(m.parameters(), t.parameters()))
    print("function changed by resets", max(same), "rank of the merged change", rank, "> 2; difference from the hand-written twin", err, "size", dW.abs().max().item(), "grad B", m.mid.B.grad.norm().item())
    assert max(same) < 1e-5 and rank == 6 and dW.abs().max() < 0.5 and err < 1e-4 and m.mid.B.grad.norm() > 0
