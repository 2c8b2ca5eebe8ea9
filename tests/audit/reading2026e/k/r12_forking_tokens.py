"""Policy gradient on forking tokens only (Wang et al. 2025, Beyond the 80/20 Rule). 80 % of the trained tokens get no gradient: only those
with the highest policy entropy in the batch count, while the sum is still divided by ALL trained tokens, with clip-higher."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
          "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time-1], constant",
          "advantages": "one group-normalised advantage per row, [rows], constant"}
SETTINGS = {"rho": "share of the tokens kept by entropy, 0.2", "clip_low": "0.2", "clip_high": "0.28"}
NOTES = ("DAPO surrogate times the indicator entropy >= the (1 - rho) quantile over the batch's trained tokens; divided by the number of all "
         "trained tokens as in the paper. The threshold and the indicator are constants (no gradient). Depends on the whole batch. All parameters are used.")


class TinyLM(nn.Module):
    """embedding -> GRU (causal by nature) -> vocabulary"""
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])          # [rows, time, vocab]


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), [rows, time-1]"""
    logp = F.log_softmax(model(ids[:, :-1]).float(), -1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def make_ids(g, rows, time, vocab=23, prompt=3):
    """prompts of 3 tokens, completions of random length, 0 = padding on the right"""
    lengths = torch.randint(prompt + 2, time + 1, (rows,), generator=g)
    pos = torch.arange(time)[None]
    ids = torch.randint(1, vocab, (rows, time), generator=g) * (pos < lengths[:, None])
    mask = ((pos >= prompt) & (pos < lengths[:, None])).float()
    return ids, mask


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = TinyLM()
    ids, mask = make_ids(g, 8, 12)
    old = token_logps(model, ids).detach()
    old = old + 0.2 * torch.randn(old.shape, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(8, generator=g)}


def right(model, batch, rho=0.2, clip_low=0.2, clip_high=0.28):
    ids, mask, adv = batch["ids"], batch["loss_mask"][:, 1:], batch["advantages"][:, None]
    logps = F.log_softmax(model(ids[:, :-1]), -1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1)
        threshold = torch.quantile(entropy[mask.bool()], 1 - rho)
        fork = (entropy >= threshold).float()
    ratio = torch.exp(logps.gather(-1, ids[:, 1:, None]).squeeze(-1) - batch["old_logps"])
    surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
    return -(surrogate * fork * mask).sum() / mask.sum()


def check(loss, slow, model, tol=2e-5):
    """same value and same gradient as the explicit version; every parameter is used"""
    params = list(model.parameters())
    a = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    b = torch.autograd.grad(slow, params, retain_graph=True, allow_unused=True)
    assert all(x is not None for x in a), "unused parameter"
    b = [torch.zeros_like(p) if x is None else x for x, p in zip(b, params)]
    norm = torch.sqrt(sum((x ** 2).sum() for x in a)).item()
    diff = max((x - y).abs().max().item() for x, y in zip(a, b))
    print(f"loss {loss.item():.6f}  slow {slow.item():.6f}  grad norm {norm:.5f}  max grad diff {diff:.1e}")
    assert abs(loss.item() - slow.item()) < tol * max(1, abs(slow.item())) and diff < tol * max(1, norm) and norm > 1e-4


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    P = F.log_softmax(m(b["ids"][:, :-1]), -1)
    toks = []
    for i in range(8):
        for t in range(P.shape[1]):
            if b["loss_mask"][i, t + 1]:
                ent = -sum((x.exp() * x).item() for x in P[i, t])
                r, a = torch.exp(P[i, t, b["ids"][i, t + 1]] - b["old_logps"][i, t]), b["advantages"][i]
                toks.append((ent, torch.min(r * a, r.clamp(0.8, 1.28) * a)))
    toks.sort(key=lambda x: x[0])
    pos = 0.8 * (len(toks) - 1); first = int(pos) + (pos > int(pos))
    check(right(m, b), -sum(x[1] for x in toks[first:]) / len(toks), m)
    print("kept", len(toks) - first, "of", len(toks))
