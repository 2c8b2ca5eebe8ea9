"""Token-level unlikelihood (Welleck et al. 2020). Tokens that already occurred in the row are pushed DOWN with -log(1 - p), each once however often it
occurred, except where such a token is the true next token; the reading of earlier ids at a position is no leak, it is the negative set."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "attention_mask": "1 for real tokens, [rows, time]"}
SETTINGS = {"alpha": "weight of the unlikelihood term, 1.0"}
NOTES = ("Mean over real target tokens of CE + alpha * sum over the set of previous targets (without the current target and padding) of -log(1 - p), with 1 - p clamped at 1e-5. Likelihood and unlikelihood share one normaliser. The first target of a row has an empty set. All parameters are used.")


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


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    mask = (torch.arange(10)[None] < torch.tensor([10, 6, 8, 4])[:, None]).long()
    return {"model": TinyLM(vocab=9), "ids": torch.randint(1, 9, (4, 10), generator=g) * mask, "attention_mask": mask}


def right(model, batch, alpha=1.0):
    inputs, target = batch["ids"][:, :-1], batch["ids"][:, 1:]
    mask = batch["attention_mask"][:, 1:].float()
    logps = F.log_softmax(model(inputs), -1)
    nll = -logps.gather(-1, target[..., None]).squeeze(-1)
    hot = F.one_hot(target, logps.shape[-1]).float()
    seen = (hot.cumsum(1) - hot).clamp(max=1)          # targets of earlier positions, each once
    seen = seen * (1 - hot)                            # never the current target
    seen[..., 0] = 0                                   # never padding
    unlike = -(seen * torch.log((1 - logps.exp()).clamp(min=1e-5))).sum(-1)
    return ((nll + alpha * unlike) * mask).sum() / mask.sum()


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
    P = torch.softmax(m(b["ids"][:, :-1]), -1); tot, n = 0.0, 0
    for i, length in enumerate([10, 6, 8, 4]):
        x = b["ids"][i].tolist()
        for t in range(length - 1):
            tot, n = tot - torch.log(P[i, t, x[t + 1]]), n + 1
            for c in set(x[1:t + 1]) - {x[t + 1]}:
                tot = tot - torch.log(1 - P[i, t, c])
    check(right(m, b), tot / n, m)
