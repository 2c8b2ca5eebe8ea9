"""Value loss as cross-entropy over bins: two-hot targets in symlog space. DreamerV3 (Hafner et al. 2023, arXiv 2301.04104).
The critic has a softmax over fixed bins. The return is squashed by symlog, and its mass is shared by the two nearest bins, so that the expectation of the bins is the squashed return. No squared error, no value clipping; the loss does not go to 0 for a perfect critic, as the two-hot target has entropy."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 at tokens whose value is trained, [rows, time]", "returns": "targets, any size, [rows, time]"}
SETTINGS = {"low": "lowest bin in symlog space, -5", "high": "highest bin, 5"}
NOTES = "The model returns logits over 31 bins at each token (its head has one output per bin, not per word). Mean over trained tokens of all rows. Targets outside the bins are clamped to the ends. returns are constants. No shift: value at t belongs to token t. All parameters are used."

class Tiny(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])

def make(seed):
    torch.manual_seed(seed); mask = (torch.rand(3, 9) < 0.6).float(); mask[:, 4] = 1
    return {"model": Tiny(), "ids": torch.randint(0, 31, (3, 9)), "loss_mask": mask, "returns": 20 * torch.randn(3, 9)}

def symlog(x):
    return x.sign() * x.abs().log1p()

def two_hot(x, bins):
    x = x.clamp(bins[0], bins[-1])
    hi = torch.searchsorted(bins, x).clamp(1, len(bins) - 1); lo = hi - 1
    w = (x - bins[lo]) / (bins[hi] - bins[lo])
    t = torch.zeros(*x.shape, len(bins))
    return t.scatter(-1, lo[..., None], (1 - w)[..., None]).scatter(-1, hi[..., None], w[..., None])

def right(model, batch, low=-5.0, high=5.0):
    logits = model(batch["ids"]); bins = torch.linspace(low, high, logits.shape[-1])
    target = two_hot(symlog(batch["returns"]), bins)
    ce = -(target * torch.log_softmax(logits, -1)).sum(-1)
    return (ce * batch["loss_mask"]).sum() / batch["loss_mask"].sum()

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward()
    bins = torch.linspace(-5, 5, 31); t = two_hot(symlog(b["returns"]), bins)
    assert torch.allclose((t * bins).sum(-1), symlog(b["returns"]).clamp(-5, 5), atol=1e-5) and torch.allclose(t.sum(-1), torch.ones(3, 9))
    lp = torch.log_softmax(m(b["ids"]), -1); ref = 0.0
    for r, k in b["loss_mask"].nonzero().tolist():
        x = max(-5.0, min(5.0, symlog(b["returns"][r, k]).item())); u = (x + 5) / (10 / 30); i = min(29, int(u)); w = u - i
        ref -= ((1 - w) * lp[r, k, i] + w * lp[r, k, i + 1]).item()
    ref /= b["loss_mask"].sum().item()
    print("loss", l.item(), "loop", ref, "grad", m.head.weight.grad.norm().item()); assert abs(l.item() - ref) < 1e-4
