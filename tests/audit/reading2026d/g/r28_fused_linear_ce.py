"""Fused linear cross-entropy (Liger, Cut-CE). The gradients are computed in the FORWARD pass, chunk by chunk, and backward only scales them; logits of the full batch never exist. Right: the loss is a scalar, so backward needs one factor."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "1 on trained tokens"}
SETTINGS = {"chunk": "tokens per chunk, 7; need not divide the number of tokens"}
NOTES = "Cross-entropy; mean over trained tokens of all rows. First derivatives only (no double backward). All parameters used."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


class FusedCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, y, chunk):
        gh, gw, loss, n = torch.empty_like(h), torch.zeros_like(w), h.new_zeros(()), h.shape[0]
        for a in range(0, n, chunk):
            hc, yc = h[a:a + chunk], y[a:a + chunk]
            lp = (hc @ w.t()).log_softmax(-1)
            loss -= lp.gather(1, yc[:, None]).sum() / n
            d = lp.exp(); d[torch.arange(len(yc)), yc] -= 1; d /= n
            gh[a:a + chunk] = d @ w; gw += d.t() @ hc
        ctx.save_for_backward(gh, gw)
        return loss

    @staticmethod
    def backward(ctx, g):
        gh, gw = ctx.saved_tensors
        return g * gh, g * gw, None, None


def make(seed):
    model, ids, mask = base_rows(seed)
    return {"model": model, "ids": ids, "loss_mask": mask}


def right(model, batch, chunk=7):
    keep = batch["loss_mask"][:, 1:].bool()
    h = model.hidden(batch["ids"])[:, :-1][keep]
    return FusedCE.apply(h, model.head.weight, batch["ids"][:, 1:][keep], chunk)


if __name__ == "__main__":
    b = make(0); model = b.pop("model"); loss = right(model, b)
    keep = b["loss_mask"][:, 1:].bool()
    ref = F.cross_entropy(model(b["ids"])[:, :-1][keep], b["ids"][:, 1:][keep])
    g, h = flat_grad(model, 3 * loss), flat_grad(model, 3 * ref)
    assert torch.allclose(loss, ref, atol=1e-5) and torch.allclose(g, h, atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "grad gap", (g - h).abs().max().item())
