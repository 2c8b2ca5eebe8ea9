"""Auxiliary-loss-free balancing (Wang et al. 2024, DeepSeek-V3): a per-expert bias is added to the router score for the CHOICE of experts only, never to the gate weight, and it is moved by
+-u * sign(mean load - load) outside the optimizer after each step. The bias is a buffer without gradient; it grows for experts that get too little."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "auxiliary losses and regularisers"
KIND = "update"
INPUTS = {"model": "MoE model with sigmoid router, buffers bias [E] and load [E]", "optimizer": "SGD over the parameters (not the bias)", "batches": "list of optimizer steps, each a list of micro-batches {ids [rows, time]} of equal shape"}
SETTINGS = {"u": "bias speed, 0.01"}
NOTES = ("Loss: next-token CE, mean over tokens; micro-batches are of equal size, hence the plain mean over them. The load counter is summed over the micro-batches of a step (and would be all-reduced over ranks), used once after optimizer.step(), then set to zero. "
         "The bias changes which experts are chosen and has no gradient by design; the gates are the unbiased sigmoid scores, normalised over the chosen. Evaluation does not count load. All parameters are used.")

class MoE(nn.Module):
    def __init__(self, V=23, d=12, E=6, k=2):
        super().__init__(); self.k = k
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.router = nn.Linear(d, E, bias=False); self.W = nn.Parameter(torch.randn(E, d, d) * d ** -0.5); self.head = nn.Linear(d, V)
        self.register_buffer("bias", torch.zeros(E)); self.register_buffer("load", torch.zeros(E), persistent=False)
    def forward(self, ids):
        x = self.rnn(self.emb(ids))[0]
        s = torch.sigmoid(self.router(x))
        idx = (s.detach() + self.bias).topk(self.k, -1).indices
        if self.training:
            self.load += torch.bincount(idx.flatten(), minlength=len(self.bias)).to(self.load)
        g = s.gather(-1, idx); g = g / g.sum(-1, keepdim=True)
        gate = torch.zeros_like(s).scatter(-1, idx, g)
        return self.head(x + torch.einsum("bte,btd,edf->btf", gate, x, self.W))

def make(seed):
    torch.manual_seed(seed); m = MoE()
    with torch.no_grad(): m.router.weight[0] *= 8
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.05), "batches": [[{"ids": torch.randint(0, 23, (4, 10))} for _ in range(2)] for _ in range(3)]}

def right(model, optimizer, batches, u=0.01):
    model.train()
    model.load.zero_()                                    # forwards made outside of training steps do not count
    for micro in batches:
        optimizer.zero_grad(set_to_none=True)
        for b in micro:
            lg = model(b["ids"])[:, :-1]
            (F.cross_entropy(lg.flatten(0, 1), b["ids"][:, 1:].flatten()) / len(micro)).backward()
        optimizer.step()
        with torch.no_grad():
            model.bias += u * torch.sign(model.load.mean() - model.load)
            model.load.zero_()

if __name__ == "__main__":
    import copy
    D = make(0); m = D["model"]; ref = copy.deepcopy(m); right(m, D["optimizer"], D["batches"])
    bias = [0.0] * 6                                       # explicit twin: gradient on all rows of a step at once
    for micro in D["batches"]:
        ids = torch.cat([b["ids"] for b in micro]); ref.bias.copy_(torch.tensor(bias)); ref.zero_grad(); ref.eval()
        lp = ref(ids)[:, :-1].log_softmax(-1); loss = -lp.gather(-1, ids[:, 1:, None]).mean(); loss.backward()
        sc = torch.sigmoid(ref.router(ref.rnn(ref.emb(ids))[0])).flatten(0, 1).tolist(); cnt = [0] * 6
        for r in sc:
            for e in sorted(range(6), key=lambda e: -(r[e] + bias[e]))[:2]: cnt[e] += 1
        with torch.no_grad():
            for p in ref.parameters(): p -= 0.05 * p.grad
        mean = sum(cnt) / 6; bias = [x + 0.01 * ((mean > c) - (mean < c)) for x, c in zip(bias, cnt)]
    err = max((a - b).abs().max().item() for a, b in zip(m.parameters(), ref.parameters()))
    print("bias", m.bias.tolist(), bias, "parameter difference", err); assert err < 1e-5 and torch.allclose(m.bias, torch.tensor(bias), atol=1e-6)
    assert all(p.grad.norm() > 0 for p in ref.parameters())
    def spread(mm, bb):
        mm.eval(); ids = torch.cat([x["ids"] for s in bb for x in s])
        s = torch.sigmoid(mm.router(mm.rnn(mm.emb(ids))[0])); return torch.bincount((s + mm.bias).topk(2, -1).indices.flatten(), minlength=6).float().std().item()
    res = {}
    for u in (0.0, 0.01):                                  # against a control without the bias; with it the load swings by about u around the balance
        C = make(0); [right(C["model"], C["optimizer"], C["batches"], u=u) for _ in range(20)]; res[u] = spread(C["model"], C["batches"])
    print("load spread after 60 steps, without and with the bias:", res); assert res[0.01] < 0.7 * res[0.0]
