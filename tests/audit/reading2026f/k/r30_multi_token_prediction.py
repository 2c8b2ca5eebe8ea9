"""Multi-token prediction (Gloeckle et al. 2024). Head k predicts the token k places ahead, all heads share one unembedding, each head is averaged over
its OWN number of targets, and the targets of far heads start later: labels shifted by 1, 2, 3 are no off-by-one."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "attention_mask": "1 for real tokens, [rows, time]"}
SETTINGS = {}
NOTES = ("Sum over n = 3 heads of the mean cross-entropy over the head's real targets (t + k inside the row). Head k drops the last k positions of each row. The shared unembedding gets gradients from all heads. Rows need at least 2 real tokens, and some row at least 4. All parameters are used.")


class MTP(nn.Module):
    def __init__(self, vocab=23, width=12, n=3):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(n))
        self.unembed = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        h = self.rnn(self.emb(ids))[0]
        return [self.unembed(h + torch.tanh(f(h))) for f in self.heads]


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    mask = (torch.arange(9)[None] < torch.tensor([9, 5, 7, 3])[:, None]).long()
    return {"model": MTP(), "ids": torch.randint(1, 23, (4, 9), generator=g) * mask, "attention_mask": mask}


def right(model, batch):
    ids, real = batch["ids"], batch["attention_mask"].bool()
    loss = 0.0
    for k, logits in enumerate(model(ids), start=1):
        keep = real[:, k:]
        loss = loss + F.cross_entropy(logits[:, :-k][keep], ids[:, k:][keep])
    return loss


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
    out, slow = m(b["ids"]), 0.0
    for k in (1, 2, 3):
        terms = []
        for i, n in enumerate([9, 5, 7, 3]):
            for t in range(n - k):
                terms.append(-torch.log_softmax(out[k - 1][i, t], 0)[b["ids"][i, t + k]])
        slow = slow + sum(terms) / len(terms)
    check(right(m, b), slow, m)
