"""Kimi k1.5 policy mirror descent (2025). The policy loss is a regression: (r - group mean - tau * log ratio)^2, where the
mean reward stands for tau * log Z; no ratio is exponentiated and the sequence log-ratio is not divided by the length."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0; consecutive rows of one prompt are a group",
          "loss_mask": "1 where the token is a trained completion token, [rows, time]", "groups": "group number of each row, 0..n-1, [rows]",
          "old_logps": "log-probabilities of ids[:, 1:] under the policy of the previous iteration, [rows, time-1], constant",
          "rewards": "reward of each row, [rows], constant"}
SETTINGS = {"tau": "strength of the KL to the previous policy, 0.5"}
NOTES = ("Squared surrogate of online policy mirror descent, mean over rows; sequence log-ratio is a sum over trained tokens. The group "
         "mean of the rewards is a constant. Groups may have any size and order. All parameters are used.")


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
    old = old + 0.1 * torch.randn(old.shape, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "groups": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]), "old_logps": old,
            "rewards": torch.randint(0, 2, (8,), generator=g).float()}


def right(model, batch, tau=0.5):
    logp = token_logps(model, batch["ids"])
    log_ratio = ((logp - batch["old_logps"]) * batch["loss_mask"][:, 1:]).sum(1)
    r, grp = batch["rewards"], batch["groups"]
    n = int(grp.max()) + 1
    mean = torch.zeros(n).index_add(0, grp, r) / torch.bincount(grp, minlength=n)
    return ((r - mean[grp] - tau * log_ratio) ** 2).mean()


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
        base = b["rewards"][b["groups"] == b["groups"][i]].mean().item()
        lr = sum(lp[i, t] - b["old_logps"][i, t] for t in range(lp.shape[1]) if b["loss_mask"][i, t + 1])
        tot = tot + (b["rewards"][i].item() - base - 0.5 * lr) ** 2 / 8
    check(right(m, b), tot, m)
