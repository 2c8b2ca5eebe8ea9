"""Several completions of one prompt in one row, with repeating positions and a mask that is not block-diagonal.
The prompt stands once, then K completions. Each completion sees the prompt and itself only; its positions start
again at the prompt's length, so positions repeat within the row and the mask lets later tokens skip
earlier ones. The first token of each completion is predicted by the prompt's last token."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'packing'
KIND = 'loss'
INPUTS = {
    'ids': 'one row: prompt, then the completions, [1, time]',
    'branch': '0 = prompt, k = completion k, [1, time]',
    'advantages': 'one per completion, constants, [completions]',
}
SETTINGS = {}
NOTES = (
    'REINFORCE: for each completion the sum of -advantage * logp of its tokens; total divided by the '
    'number of completion tokens. Equals prompt + completion run one by one. '
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


def token_logps(model, ids, **kw):
    """log-probability of ids[:, 1:] given what comes before, [rows, time - 1]"""
    logits = model(ids, **kw)[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    parts = [0] * 5 + sum([[k] * int(torch.randint(2, 6, (1,), generator=g)) for k in (1, 2, 3)], [])
    return {"model": Tiny(), "ids": torch.randint(0, 20, (1, len(parts)), generator=g),
            "branch": torch.tensor([parts]), "advantages": torch.randn(3, generator=g)}


def right(model, batch):
    ids, br = batch["ids"], batch["branch"]
    t = ids.shape[1]
    p = int((br == 0).sum())
    sees = ((br[:, :, None] == br[:, None, :]) | (br[:, None, :] == 0)) & torch.ones(t, t, dtype=torch.bool).tril()
    start = torch.stack([(br[0] == k).nonzero()[0, 0] for k in range(int(br.max()) + 1)])
    positions = torch.arange(t) - start[br[0]] + torch.where(br[0] > 0, p, 0)
    logp = model(ids, positions[None], sees).log_softmax(-1)[0]
    first = torch.zeros(t, dtype=torch.bool)
    first[start] = True
    source = torch.where(first, torch.tensor(p - 1), torch.arange(t) - 1)      # which position predicts token t
    own = br[0] > 0
    picked = logp[source[own], ids[0, own]]
    return -(batch["advantages"][br[0, own] - 1] * picked).sum() / own.sum()


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    total, n = 0.0, 0
    for k in (1, 2, 3):
        seq = b["ids"][:, (b["branch"][0] == 0) | (b["branch"][0] == k)]
        lp = token_logps(model, seq)[0, 4:]
        total, n = total - b["advantages"][k - 1] * lp.sum(), n + len(lp)
    loss = right(model, b)
    loss.backward()
    print("loss", loss.item(), "one by one", (total / n).item(), "gradient", model.qkv.weight.grad.norm().item())
    assert torch.allclose(loss, total / n, atol=1e-5)
