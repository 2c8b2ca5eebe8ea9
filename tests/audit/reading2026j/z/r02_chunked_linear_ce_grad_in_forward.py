"""Fused linear + cross-entropy that computes its gradients in the FORWARD pass, chunk by chunk, under no_grad, and in backward
only scales them by grad_output (Liger-Kernel FusedLinearCrossEntropy). The full logits never exist; the result is the ordinary mean cross-entropy."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "sft and pre-training losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "labels": "[rows, time], not shifted, -100 where not trained"}
SETTINGS = {"chunk": "tokens per chunk, 4; changes memory only, not the value"}
NOTES = ("Next-token cross-entropy, mean over the trained tokens of all rows (at least one). labels are constants. Every parameter is used; model.hidden(ids) "
         "gives the features and model.head (no bias) is the output matrix. First-order gradients only (once_differentiable).")

class LM(nn.Module):
    def __init__(self, V=31, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.rnn = nn.GRU(d, d, batch_first=True); self.head = nn.Linear(d, V, bias=False)
    def hidden(self, ids): return self.rnn(self.emb(ids))[0]
    def forward(self, ids): return self.head(self.hidden(ids))

class LinearCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, W, y, chunk):
        n = (y != -100).sum().clamp(min=1)
        gh, gW = torch.zeros_like(h), torch.zeros_like(W, dtype=torch.float32)
        loss = h.new_zeros((), dtype=torch.float32)
        for s in range(0, len(h), chunk):
            hc, yc = h[s:s + chunk], y[s:s + chunk]
            keep = yc != -100; safe = yc.clamp(min=0)
            z = (hc @ W.T).float()
            lse = z.logsumexp(-1)
            loss += ((lse - z.gather(1, safe[:, None])[:, 0]) * keep).sum() / n
            g = (z - lse[:, None]).exp_()                                   # softmax; becomes the gradient in place
            g.scatter_add_(1, safe[:, None], -torch.ones_like(g[:, :1]))
            g.mul_(keep[:, None] / n)
            gh[s:s + chunk] = g.to(h.dtype) @ W
            gW += g.T @ hc.float()
        ctx.save_for_backward(gh, gW.to(W.dtype))
        return loss
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, go):
        gh, gW = ctx.saved_tensors
        return gh * go, gW * go, None, None

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 31, (3, 9)); labels = ids.clone(); labels[0, :4] = -100; labels[2, 7:] = -100
    return {"model": LM(), "ids": ids, "labels": labels}

def right(model, batch, chunk=4):
    h = model.hidden(batch["ids"])[:, :-1].reshape(-1, model.head.in_features)
    return LinearCE.apply(h, model.head.weight, batch["labels"][:, 1:].reshape(-1), chunk)

if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    l = right(m, b); (3 * l).backward(); g = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    ref = F.cross_entropy(m(b["ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten()); (3 * ref).backward()
    err = max((a - p.grad).abs().max().item() for a, p in zip(g, m.parameters()))
    print(l.item(), ref.item(), "gradient difference", err, "norm", sum(x.norm().item() for x in g))
    assert abs(l - ref) < 1e-6 and err < 1e-6 and min(x.norm() for x in g) > 0
    for c in (1, 7, 100): assert abs(right(m, b, chunk=c) - l) < 1e-6
