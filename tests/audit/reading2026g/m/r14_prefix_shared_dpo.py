"""DPO with prefix sharing: prompt, chosen and rejected answer lie in one row (Wang & Hegde, "Accelerating DPO through prefix sharing"). The rejected answer sees the prompt but not the chosen answer, its positions start again after the prompt, and its first token is predicted from the last prompt position, far to the left, not from its left neighbour."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]: prompt, chosen, rejected, padding", "part": "[rows, time]: 0 prompt, 1 chosen, 2 rejected, -1 padding",
          "ref_chosen": "[rows], summed reference log-probability of the chosen answer", "ref_rejected": "[rows], the same for the rejected one"}
SETTINGS = {"beta": "DPO beta, 0.1"}
NOTES = "Preference loss (DPO). Reduction: mean over rows (pairs). Log-probabilities are summed over answer tokens, not averaged. ref_* are constants. All three parts are non-empty in each row. The head's bias, like all parameters, is used."
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_len=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        """ids [B, T]; positions [B, T]; mask [B, T, T], True where query may see key. Returns logits [B, T, V]."""
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T).expand(B, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out(a @ v)
        return self.head(torch.tanh(x))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    part = torch.tensor([[0] * 5 + [1] * 4 + [2] * 7 + [-1] * 2, [0] * 3 + [1] * 8 + [2] * 2 + [-1] * 5, [0] * 6 + [1] * 6 + [2] * 6])
    ids = torch.randint(1, 32, part.shape, generator=g) * (part >= 0)
    n = torch.tensor([4.0, 8, 6]), torch.tensor([7.0, 2, 6])
    return {"model": TinyLM(), "ids": ids, "part": part, "ref_chosen": -3.4 * n[0] + torch.randn(3, generator=g),
            "ref_rejected": -3.4 * n[1] + torch.randn(3, generator=g)}


def right(model, batch, beta=0.1):
    ids, part = batch["ids"], batch["part"]
    T = ids.shape[1]
    t = torch.arange(T)
    sees = (part[:, :, None] == part[:, None, :]) | ((part[:, None, :] == 0) & (part[:, :, None] > 0))
    mask = sees & (t[:, None] >= t[None, :])
    lp = model(ids, mask.sum(-1) - 1, mask).log_softmax(-1)
    prompt_end = (part == 0).sum(1, keepdim=True) - 1
    first = part != torch.cat([part[:, :1], part[:, :-1]], 1)
    source = torch.where(first & (part > 0), prompt_end, (t - 1).clamp(min=0))        # where token t is predicted
    tok = lp[torch.arange(len(ids))[:, None], source, ids]
    chosen, rejected = (tok * (part == 1)).sum(1), (tok * (part == 2)).sum(1)
    margin = beta * ((chosen - batch["ref_chosen"]) - (rejected - batch["ref_rejected"]))
    return -nn.functional.logsigmoid(margin).mean(), {"accuracy": (margin > 0).float().mean().item()}


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss, info = right(m, b)
    loss.backward()
    vals = []
    for r in range(3):
        p = b["ids"][r][b["part"][r] == 0]
        def lps(k):
            a = b["ids"][r][b["part"][r] == k]
            lp = m(torch.cat([p, a])[None])[0].log_softmax(-1)
            return sum(lp[len(p) - 1 + i, a[i]] for i in range(len(a)))
        vals.append(-nn.functional.logsigmoid(0.1 * (lps(1) - b["ref_chosen"][r] - lps(2) + b["ref_rejected"][r])))
    ref = sum(vals) / 3
    gn = sum(p.grad.norm() for p in m.parameters())
    print(loss.item(), ref.item(), info, "grad", gn.item())
    assert torch.allclose(loss, ref, atol=1e-5) and gn > 0
