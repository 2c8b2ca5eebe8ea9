"""Router z-loss injected through an autograd function (Megatron-LM MoEAuxLossAutoScaler, DeepSeek AddAuxiliaryLoss): the forward value of the activation is unchanged and the reported loss does NOT contain the z-loss,
but backward also sends gradient 1 (times a scale) into it. The printed loss stays a clean cross-entropy while the router is regularised."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "auxiliary losses and regularisers"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]"}
SETTINGS = {"z_coef": "router z-loss coefficient, 0.01"}
NOTES = ("Value: next-token CE, mean over all targets of all rows. Gradient: that of CE + z_coef * mean over all tokens of logsumexp(router logits)^2 (ST-MoE z-loss). Value and gradient differ on purpose: a finite-difference test of the value misses the z-loss. "
         "The injected gradient does not scale with a factor that the caller puts on the returned loss; under loss scaling or accumulation AutoScaler.scale must be set to the same factor (1.0 here). All parameters are used.")

class AutoScaler(torch.autograd.Function):
    scale = 1.0
    @staticmethod
    def forward(ctx, out, aux):
        ctx.save_for_backward(aux)
        return out.view_as(out)
    @staticmethod
    def backward(ctx, g):
        aux, = ctx.saved_tensors
        return g, torch.ones_like(aux) * AutoScaler.scale

class MoE(nn.Module):
    def __init__(self, V=23, d=12, E=4):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.router = nn.Linear(d, E); self.W = nn.Parameter(torch.randn(E, d, d) * d ** -0.5); self.head = nn.Linear(d, V)
    def forward(self, ids, z_coef=0.0):
        x = self.rnn(self.emb(ids))[0]; z = self.router(x)
        p = z.softmax(-1)
        if z_coef and torch.is_grad_enabled():
            p = AutoScaler.apply(p, z_coef * z.logsumexp(-1).square().mean())
        g, i = p.topk(2, -1); gate = torch.zeros_like(p).scatter(-1, i, g)
        return self.head(x + torch.einsum("bte,btd,edf->btf", gate, x, self.W))

def make(seed):
    torch.manual_seed(seed); return {"model": MoE(), "ids": torch.randint(0, 23, (3, 9))}

def right(model, batch, z_coef=0.01):
    ids = batch["ids"]
    return F.cross_entropy(model(ids, z_coef)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); ids = b["ids"]; l = right(m, b); l.backward(); g = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    lp = m(ids).log_softmax(-1); ce = -torch.stack([lp[i, t, ids[i, t + 1]] for i in range(3) for t in range(8)]).mean()
    z = m.router(m.rnn(m.emb(ids))[0]); zl = torch.stack([torch.log(z[i, t].exp().sum()) ** 2 for i in range(3) for t in range(9)]).mean()
    ce.backward(retain_graph=True); gc = [p.grad.clone() for p in m.parameters()]; (0.01 * zl).backward()
    err = max((x - p.grad).abs().max().item() for x, p in zip(g, m.parameters())); far = max((x - y).abs().max().item() for x, y in zip(g, gc))
    print("value", l.item(), "ce", ce.item(), "z", zl.item(), "gradient vs sum", err, "vs ce alone", far)
    assert abs(l - ce) < 1e-6 and err < 1e-6 and far > 1e-4 and min(x.norm() for x in g) > 0
