"""GSPO-token (Qwen, 2025). Every token carries the same number, the length-normalised sequence ratio, multiplied by
exp(logp - logp.detach()) = 1; the clip range is about 1e-4 wide because the ratio is a geometric mean over tokens."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "policy gradient"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "loss_mask": "1 where the token is a trained completion token, [rows, time]",
          "old_logps": "log-probabilities of ids[:, 1:] under the sampling policy, [rows, time-1], constant",
          "advantages": "one group-normalised advantage per row, [rows], constant"}
SETTINGS = {"eps_low": "lower clip 3e-4", "eps_high": "upper clip 4e-4"}
NOTES = ("GSPO in its token form: mean over rows of the mean over the row's trained tokens. The sequence ratio is detached and the "
         "gradient comes from exp(logp - sg(logp)); value and gradient equal the sequence-level GSPO. All parameters are used.")


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
    old = old + 1e-3 * torch.randn(old.shape, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logps": old, "advantages": torch.randn(8, generator=g)}


def right(model, batch, eps_low=3e-4, eps_high=4e-4):
    logp = token_logps(model, batch["ids"])
    mask = batch["loss_mask"][:, 1:]
    length = mask.sum(1)
    log_s = ((logp - batch["old_logps"]) * mask).sum(1) / length
    ratio = torch.exp(log_s.detach()[:, None] + logp - logp.detach())
    adv = batch["advantages"][:, None]
    surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv)
    return -((surrogate * mask).sum(1) / length).mean()


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
    for i in range(8):                                  # sequence-level GSPO
        k = b["loss_mask"][i, 1:].bool()
        s = torch.exp((lp[i][k] - b["old_logps"][i][k]).mean())
        a = b["advantages"][i]
        tot = tot - torch.min(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a) / 8
    check(right(m, b), tot, m)
