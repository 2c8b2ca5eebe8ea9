"""TOPR, tapered off-policy REINFORCE (Le Roux et al. 2025). Positive rows get no importance weight at all (plain SFT
weight 1), negative rows get the whole-sequence ratio truncated to [0, 1]: the two signs are treated differently on purpose."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
          "mu_logps": "log-probability of the whole completion under the behaviour policy, [rows], constant",
          "rewards": "+1 or -1 per row, [rows], constant"}
SETTINGS = {}
NOTES = ("TOPR: mean over rows of -weight * reward * (sum of the row's token log-probabilities); no length normaliser (REINFORCE on "
         "sequences). weight is detached: 1 for positive rewards, min(1, pi/mu) for negative ones. All parameters are used.")


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
    mu = (token_logps(model, ids).detach() * mask[:, 1:]).sum(1) + 0.7 * torch.randn(8, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "mu_logps": mu, "rewards": torch.tensor([1., -1, -1, 1, -1, -1, 1, -1])}


def right(model, batch):
    seq = (token_logps(model, batch["ids"]) * batch["loss_mask"][:, 1:]).sum(1)
    with torch.no_grad():
        tapered = torch.exp((seq - batch["mu_logps"]).clamp(max=0.0))
        weight = torch.where(batch["rewards"] > 0, torch.ones_like(tapered), tapered)
    return -(weight * batch["rewards"] * seq).mean()


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
    lp, tot = token_logps(m, b["ids"]), 0.0
    for i in range(8):
        s = lp[i][b["loss_mask"][i, 1:].bool()].sum()
        r = b["rewards"][i].item()
        w = 1.0 if r > 0 else min(1.0, torch.exp(s - b["mu_logps"][i]).item())
        tot = tot - w * r * s / 8
    check(right(m, b), tot, m)
