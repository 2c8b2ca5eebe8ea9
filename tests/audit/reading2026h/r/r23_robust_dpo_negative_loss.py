"""A preference loss that becomes negative. Robust DPO (Chowdhury et al., arXiv 2403.00409; loss_type "robust" in TRL)
corrects for a known rate eps of flipped labels: ((1 - eps) * L(chosen > rejected) - eps * L(rejected > chosen)) / (1 - 2
eps). The second term is subtracted, not added as in label smoothing, so the loss is an unbiased estimate of the clean one,
has no lower bound, and pushes harder than DPO."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"chosen": "prompt and chosen answer, [rows, time]", "chosen_mask": "1 = answer token, [rows, time]",
          "rejected": "prompt and rejected answer, [rows, time]", "rejected_mask": "[rows, time]",
          "ref_chosen": "log probability of the chosen answer (sum) under the reference, [rows]", "ref_rejected": "[rows]"}
SETTINGS = {"beta": "0.1", "eps": "rate of flipped preference labels, 0.1"}
NOTES = ("Preference family; mean over pairs. Sequence log probabilities are sums over answer tokens. ref_* are constants. "
         "Uses all parameters. eps < 0.5.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def _seq_logp(model, ids, mask):
    lp = -F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (lp * mask[:, 1:]).sum(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, ref = TinyLM(), TinyLM()
    prompt = torch.randint(1, 32, (4, 4), generator=g)
    out = {"model": model}
    for name in ("chosen", "rejected"):
        out[name] = torch.cat([prompt, torch.randint(1, 32, (4, 6), generator=g)], 1)
        end = 4 + torch.randint(2, 7, (4, 1), generator=g)
        col = torch.arange(10)[None]
        out[name + "_mask"] = ((col >= 4) & (col < end)).float()
        with torch.no_grad():
            out["ref_" + name] = _seq_logp(ref, out[name], out[name + "_mask"])
    return out


def right(model, batch, beta=0.1, eps=0.1):
    h = beta * ((_seq_logp(model, batch["chosen"], batch["chosen_mask"]) - batch["ref_chosen"])
                - (_seq_logp(model, batch["rejected"], batch["rejected_mask"]) - batch["ref_rejected"]))
    losses = (-F.logsigmoid(h) * (1 - eps) + F.logsigmoid(-h) * eps) / (1 - 2 * eps)
    return losses.mean(), {"margin": h.mean().item()}


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss, metrics = right(m, c)
    loss.backward()
    # unbiased: flipping the pair with probability eps gives the clean DPO loss on average
    swap = {k: c[k.replace("chosen", "x").replace("rejected", "chosen").replace("x", "rejected")] for k in c}
    with torch.no_grad():
        noisy = 0.9 * right(m, c)[0] + 0.1 * right(m, swap)[0]
        clean = right(m, c, eps=0.0)[0]
    print("loss", loss.item(), metrics, "mean over flips", noisy.item(), "DPO", clean.item())
    assert abs(noisy - clean) < 1e-5 and all(p.grad.abs().sum() > 0 for p in m.parameters())
    h = torch.tensor(20.0)
    print("loss at a large margin", ((-F.logsigmoid(h) * 0.9 + F.logsigmoid(-h) * 0.1) / 0.8).item())
