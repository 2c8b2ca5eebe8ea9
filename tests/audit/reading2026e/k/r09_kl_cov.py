"""KL-Cov (Cui et al. 2025, The Entropy Mechanism). There is no clip: only the few tokens whose centred product of log-probability
and advantage is largest get an extra |log ratio| penalty; the selection is computed on detached numbers over the whole batch."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
          "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time-1], constant",
          "advantages": "advantage per predicted token, [rows, time-1], constant"}
SETTINGS = {"k_ratio": "share of the trained tokens that is penalised, 0.1 (2e-4 in large runs), at least one", "kl_coef": "weight of the penalty, 1.0"}
NOTES = ("KL-Cov: mean over all trained tokens of the batch of -ratio * A, plus kl_coef * |logp - old_logp| for the top k_ratio tokens by "
         "covariance. Depends on the whole batch (means and top-k), so micro-batches would select differently. All parameters are used.")


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


def right(model, batch, k_ratio=0.1, kl_coef=1.0):
    trained = batch["loss_mask"][:, 1:].bool()
    diff = (token_logps(model, batch["ids"]) - batch["old_logps"])[trained]
    logp, adv = (diff.detach() + batch["old_logps"][trained]), batch["advantages"][trained]
    cov = (logp - logp.mean()) * (adv - adv.mean())
    k = max(1, int(k_ratio * len(cov)))
    chosen = torch.zeros_like(cov).index_fill(0, cov.topk(k).indices, 1.0)
    return (-adv * torch.exp(diff) + kl_coef * chosen * diff.abs()).mean()


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
    lp = token_logps(m, b["ids"])
    toks = [(lp[i, t], b["old_logps"][i, t].item(), b["advantages"][i, t].item()) for i in range(8) for t in range(lp.shape[1]) if b["loss_mask"][i, t + 1]]
    n = len(toks); ml = sum(x[0].item() for x in toks) / n; ma = sum(x[2] for x in toks) / n
    order = sorted(range(n), key=lambda j: -(toks[j][0].item() - ml) * (toks[j][2] - ma))
    top = set(order[:max(1, int(0.1 * n))])
    tot = sum(-a * torch.exp(x - o) + (torch.abs(x - o) if j in top else 0) for j, (x, o, a) in enumerate(toks))
    check(right(m, b), tot / n, m)
