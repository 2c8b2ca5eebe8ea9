"""KTO (Ethayarajh et al. 2024). Unpaired rows; the reference point is a KL estimated on MISMATCHED prompt/completion pairs, clamped at 0
and detached; the loss is 1 - sigmoid, not its logarithm."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "token ids of prompt + completion, [rows, time], right-padded with 0", "loss_mask": "1 where the token belongs to the completion, [rows, time]",
          "desirable": "True for a good completion, [rows]", "ref_logps": "log-probability of the completion under the reference, [rows], constant",
          "kl_ids": "prompt of the row with the completion of the next row, [rows, time]", "kl_mask": "completion tokens of kl_ids", "ref_kl_logps": "log-probability of the mismatched completion under the reference, [rows], constant"}
SETTINGS = {"beta": "0.5", "w_good": "weight of desirable rows, 1.0", "w_bad": "weight of undesirable rows, 1.2"}
NOTES = ("KTO: mean over rows of the weighted 1 - sigmoid(+-(beta * (log ratio - z0))). z0 is a batch statistic without gradient and needs at least two rows; kl_ids give no gradient. Sequence log-probabilities are sums. All parameters are used.")


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


def seq_logps(model, ids, mask):
    return (token_logps(model, ids) * mask[:, 1:]).sum(1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    model = TinyLM()
    ids, mask = make_ids(g, 6, 12)
    kl_ids, kl_mask = torch.cat([ids[:, :3], ids.roll(-1, 0)[:, 3:]], 1), mask.roll(-1, 0)
    with torch.no_grad():
        ref = seq_logps(model, ids, mask) + torch.randn(6, generator=g)
        ref_kl = seq_logps(model, kl_ids, kl_mask) + torch.randn(6, generator=g) - 0.5
    return {"model": model, "ids": ids, "loss_mask": mask, "desirable": torch.tensor([True, False, True, True, False, False]),
            "ref_logps": ref, "kl_ids": kl_ids, "kl_mask": kl_mask, "ref_kl_logps": ref_kl}


def right(model, batch, beta=0.5, w_good=1.0, w_bad=1.2):
    with torch.no_grad():
        z0 = (seq_logps(model, batch["kl_ids"], batch["kl_mask"]) - batch["ref_kl_logps"]).mean().clamp(min=0)
    ratio = seq_logps(model, batch["ids"], batch["loss_mask"]) - batch["ref_logps"]
    good = w_good * (1 - torch.sigmoid(beta * (ratio - z0)))
    bad = w_bad * (1 - torch.sigmoid(beta * (z0 - ratio)))
    return torch.where(batch["desirable"], good, bad).mean(), {"kl": z0.item()}


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
    lp, kp = token_logps(m, b["ids"]), token_logps(m, b["kl_ids"]).detach()
    z = max(0.0, sum((kp[i] * b["kl_mask"][i, 1:]).sum().item() - b["ref_kl_logps"][i].item() for i in range(6)) / 6)
    tot = 0.0
    for i in range(6):
        d = (lp[i] * b["loss_mask"][i, 1:]).sum() - b["ref_logps"][i].item() - z
        tot = tot + (1.0 / (1 + torch.exp(0.5 * d)) if b["desirable"][i] else 1.2 / (1 + torch.exp(-0.5 * d))) / 6
    loss, metrics = right(m, b); print(metrics)
    check(loss, tot, m)
