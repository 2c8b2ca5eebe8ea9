"""Listwise DPO with the Plackett-Luce model (Rafailov et al. 2023, appendix). K ranked completions per prompt; the denominators are a reversed
logcumsumexp along the rank, and the last place contributes exactly 0."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "token ids, [prompts, K, time], best completion first, right-padded with 0", "loss_mask": "1 where the token belongs to the completion, [prompts, K, time]",
          "ref_logps": "log-probability of each completion under the reference, [prompts, K], constant"}
SETTINGS = {"beta": "0.3"}
NOTES = ("Plackett-Luce DPO: mean over prompts of the negative log-likelihood of the whole ranking (a sum over ranks; for K = 2 it is plain DPO). The order of the second axis carries the label. All parameters are used.")


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
    ids, mask = make_ids(g, 12, 10)
    ids[:, :3] = ids[::4, :3].repeat_interleave(4, 0)
    ref = (token_logps(model, ids).detach() * mask[:, 1:]).sum(1) + torch.randn(12, generator=g)
    return {"model": model, "ids": ids.view(3, 4, 10), "loss_mask": mask.view(3, 4, 10), "ref_logps": ref.view(3, 4)}


def right(model, batch, beta=0.3):
    p, k, _ = batch["ids"].shape
    logp = token_logps(model, batch["ids"].flatten(0, 1)) * batch["loss_mask"].flatten(0, 1)[:, 1:]
    score = beta * (logp.sum(1).view(p, k) - batch["ref_logps"])
    denominator = score.flip(1).logcumsumexp(1).flip(1)
    return (denominator - score).sum(1).mean()


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
    tot = 0.0
    for p in range(3):
        s = [0.3 * ((token_logps(m, b["ids"][p, k:k + 1])[0] * b["loss_mask"][p, k, 1:]).sum() - b["ref_logps"][p, k]) for k in range(4)]
        for k in range(4):
            tot = tot - torch.log(torch.exp(s[k]) / sum(torch.exp(x) for x in s[k:])) / 3
    check(right(m, b), tot, m)
