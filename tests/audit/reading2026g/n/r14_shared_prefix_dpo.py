"""DPO with prefix sharing (Wang & Hegde 2024, "Accelerating DPO through prefix sharing"). Prompt, chosen and rejected stand in one row; the rejected answer takes up positions again behind the prompt, does not see the chosen one, and its first token is predicted from the last prompt token, not from its left neighbour."""
import torch
from torch import nn
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "prompt + chosen + rejected in one row, [rows, time], no padding", "segment": "0 prompt, 1 chosen, 2 rejected, in this order, each present, [rows, time]",
          "ref_chosen": "reference log-probability of the chosen answer (sum), [rows], constant", "ref_rejected": "same for the rejected answer"}
SETTINGS = {"beta": "0.1"}
NOTES = "Preference loss -log sigmoid(beta * margin); sums over answer tokens, mean over rows. Prompt tokens are not trained. Log-probabilities are per row, so any number of rows. Every parameter is used."
class Tiny(nn.Module):
    """One attention layer and an MLP-free head; position_ids and allowed ([B,T,T] bool) are optional."""
    def __init__(self, vocab=40, width=16, places=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, position_ids=None, allowed=None):
        T = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T).expand_as(ids)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(ids.shape[0], T, T)
        h = self.emb(ids) + self.pos(position_ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        a = s.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(h + self.o(a @ self.v(h)))

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    B, T = 3, 20; seg = torch.zeros(B, T, dtype=torch.long)
    for b, (p, c) in enumerate(((5, 8), (7, 6), (4, 4))):
        seg[b, p:p + c] = 1; seg[b, p + c:] = 2
    return {"model": Tiny(), "ids": torch.randint(0, 40, (B, T), generator=g), "segment": seg,
            "ref_chosen": -30 - 3 * torch.rand(B, generator=g), "ref_rejected": -35 - 3 * torch.rand(B, generator=g)}

def right(model, batch, beta=0.1):
    ids, seg = batch["ids"], batch["segment"]
    B, T = ids.shape; where = torch.arange(T).expand(B, T)
    p, c = (seg == 0).sum(1, keepdim=True), (seg == 1).sum(1, keepdim=True)
    position = where - c * (seg == 2)
    allowed = torch.ones(T, T, dtype=torch.bool).tril() & ((seg[:, None] == 0) | (seg[:, None] == seg[:, :, None]))
    logp = model(ids, position, allowed).log_softmax(-1)
    source = torch.where(where == p + c, p - 1, where - 1).clamp(min=0)          # who predicts token t
    tok = logp.gather(1, source[..., None].expand(-1, -1, logp.shape[-1])).gather(-1, ids[..., None])[..., 0]
    chosen, rejected = (tok * (seg == 1)).sum(1), (tok * (seg == 2)).sum(1)
    margin = chosen - batch["ref_chosen"] - (rejected - batch["ref_rejected"])
    return -nn.functional.logsigmoid(beta * margin).mean(), {"accuracy": (margin > 0).float().mean().item()}

if __name__ == "__main__":
    d = make(0); model = d.pop("model"); loss, _ = right(model, d); g1 = torch.autograd.grad(loss, list(model.parameters()))
    terms = []
    for b in range(3):
        x, s = d["ids"][b], d["segment"][b]; sums = []
        for k in (1, 2):
            full = torch.cat([x[s == 0], x[s == k]]); n = int((s == 0).sum()); lp = model(full[None])[0].log_softmax(-1)
            sums.append(sum(lp[t - 1, full[t]] for t in range(n, len(full))))
        terms.append(-nn.functional.logsigmoid(.1 * (sums[0] - sums[1] - d["ref_chosen"][b] + d["ref_rejected"][b])))
    ref = torch.stack(terms).mean(); g2 = torch.autograd.grad(ref, list(model.parameters()))
    print(loss.item(), ref.item()); assert abs(loss - ref) < 1e-5
    assert all(torch.allclose(a, b, atol=1e-5) and a.abs().sum() > 0 for a, b in zip(g1, g2))
