"""Pairwise reward model of DeepSpeed-Chat. The ranking loss is not on the last token: it is averaged over every position from the first token where
the two completions DIFFER to the end of the longer one, padding of the shorter one included; inference uses the last token only."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "token ids, [pairs, time], right-padded with 0 (0 never occurs inside a row)", "rejected_ids": "the same for the worse completion; shares the prompt and perhaps a prefix of the answer"}
SETTINGS = {}
NOTES = ("Mean over pairs of the mean over the divergent span of -log sigmoid(r_chosen[t] - r_rejected[t]). Positions of the shared prefix do not count. The scored padding positions of the shorter row are intended, as in the library. Pairs must differ somewhere. All parameters are used.")


class RewardModel(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, ids):
        return self.score(self.rnn(self.emb(ids))[0]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    c, r = (torch.randint(1, 23, (5, 12), generator=g) for _ in range(2))
    for i, same in enumerate([3, 3, 5, 4, 6]):
        r[i, :same] = c[i, :same]
        r[i, same] = c[i, same] % 22 + 1
        c[i, int(torch.randint(same + 1, 13, (1,), generator=g)):] = 0
        r[i, int(torch.randint(same + 1, 13, (1,), generator=g)):] = 0
    return {"model": RewardModel(), "chosen_ids": c, "rejected_ids": r}


def right(model, batch):
    c, r = batch["chosen_ids"], batch["rejected_ids"]
    start = (c != r).float().argmax(1, keepdim=True)              # first difference
    end = torch.maximum((c != 0).sum(1, keepdim=True), (r != 0).sum(1, keepdim=True))
    pos = torch.arange(c.shape[1])[None]
    span = ((pos >= start) & (pos < end)).float()
    per_token = -F.logsigmoid(model(c) - model(r))
    return ((per_token * span).sum(1) / span.sum(1)).mean()


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
    C, R = m(b["chosen_ids"]), m(b["rejected_ids"])
    tot = 0.0
    for i in range(5):
        c, r = b["chosen_ids"][i].tolist(), b["rejected_ids"][i].tolist()
        s = next(t for t in range(12) if c[t] != r[t])
        e = max((c + [0]).index(0), (r + [0]).index(0))
        tot = tot - torch.log(torch.sigmoid(C[i, s:e] - R[i, s:e])).mean() / 5
    check(right(m, b), tot, m)
