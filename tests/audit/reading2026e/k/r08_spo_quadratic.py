"""SPO, simple policy optimisation (Xie et al. 2024). PPO without min() and clamp(): r*A minus |A|/(2 eps) * (r-1)^2, a parabola
whose maximum is exactly at the border r = 1 + sign(A) eps. eps stands in a denominator, and a small eps means a strong penalty."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
          "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time-1], constant",
          "advantages": "advantage per predicted token, [rows, time-1], constant"}
SETTINGS = {"eps": "trust-region radius of the ratio, 0.2; the penalty is divided by 2 * eps, so eps must be positive"}
NOTES = "SPO: mean over all trained tokens of -(ratio * A - |A| / (2 eps) * (ratio - 1)^2). Tokens outside the region are pulled back. All parameters are used."


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
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(old.shape, generator=g)}


def right(model, batch, eps=0.2):
    mask, adv = batch["loss_mask"][:, 1:], batch["advantages"]
    ratio = torch.exp(token_logps(model, batch["ids"]) - batch["old_logps"])
    objective = ratio * adv - adv.abs() / (2 * eps) * (ratio - 1).square()
    return -(objective * mask).sum() / mask.sum()


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
    lp, n, tot = token_logps(m, b["ids"]), 0, 0.0
    for i in range(8):
        for t in range(lp.shape[1]):
            if b["loss_mask"][i, t + 1]:
                r, a = torch.exp(lp[i, t] - b["old_logps"][i, t]), b["advantages"][i, t].item()
                border = 1.2 if a > 0 else 0.8     # completed square: maximum at the border
                tot, n = tot - (-abs(a) / 0.4 * (r - border) ** 2 + abs(a) / 0.4 * (border ** 2 - 1)), n + 1
    check(right(m, b), tot / n, m)
