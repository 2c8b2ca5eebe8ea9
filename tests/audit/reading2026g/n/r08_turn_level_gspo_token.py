"""Turn-level GSPO-token. The importance ratio is one geometric mean per model turn, detached, times p / stopgrad(p), which is numerically 1: the value sees only the turn ratio, the gradient reaches each token (GSPO-token, Zheng et al. 2025, applied per turn as in turn-level agent RL)."""
import torch
from torch import nn
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "turn_ids": "0 for prompt and tool outputs, k = 1, 2, ... for tokens of the k-th model turn, [rows, time], column 0 is 0",
          "old_logprobs": "log-probability of each token under the sampling policy, aligned with the token, [rows, time]",
          "turn_advantages": "advantage of each turn, [rows, turns], column k-1 for turn k, constant"}
SETTINGS = {"clip_low": "0.03", "clip_high": "0.04, sequence-level ratios need narrow clips"}
NOTES = "Reduction: mean over the tokens of a turn, then mean over all turns of all rows (a row with more turns counts more). Clipped policy gradient; ratios are computed per turn. old_logprobs and turn_advantages are constants. Every parameter is used."
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
    B, T = 3, 18; model = Tiny(); ids = torch.randint(0, 40, (B, T), generator=g)
    turn = torch.zeros(B, T, dtype=torch.long)
    turn[:, 3:7] = 1; turn[:, 9:12] = 2; turn[1:, 14:18] = 3
    with torch.no_grad():
        lp = torch.zeros(B, T)
        lp[:, 1:] = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return {"model": model, "ids": ids, "turn_ids": turn, "old_logprobs": lp + 0.05 * torch.randn(B, T, generator=g), "turn_advantages": torch.randn(B, 3, generator=g)}

def right(model, batch, clip_low=0.03, clip_high=0.04):
    ids, turn = batch["ids"], batch["turn_ids"][:, 1:]
    logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    K = batch["turn_advantages"].shape[1]
    hot = nn.functional.one_hot(turn, K + 1)[..., 1:].to(logp.dtype)          # rows, time, turns
    size = hot.sum(1)                                                         # rows, turns
    mean = torch.einsum("bt,btk->bk", (logp - batch["old_logprobs"][:, 1:]).detach(), hot) / size.clamp(min=1)
    s = torch.einsum("bk,btk->bt", mean.exp(), hot)                           # turn ratio at each token, constant
    ratio = s * torch.exp(logp - logp.detach())
    A = torch.einsum("bk,btk->bt", batch["turn_advantages"], hot)
    gain = torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)
    per_turn = torch.einsum("bt,btk->bk", gain, hot) / size.clamp(min=1)
    return -per_turn.sum() / (size > 0).sum()

if __name__ == "__main__":
    d = make(0); model = d.pop("model"); loss = right(model, d)
    g1 = torch.autograd.grad(loss, list(model.parameters()))
    lp = model(d["ids"]).log_softmax(-1); terms = []
    for b in range(3):
        for k in (1, 2, 3):
            at = [t for t in range(18) if d["turn_ids"][b, t] == k]
            if at:                                                            # direct: differentiate the geometric mean
                s = torch.stack([lp[b, t - 1, d["ids"][b, t]] - d["old_logprobs"][b, t] for t in at]).mean().exp()
                A = d["turn_advantages"][b, k - 1]; terms.append(torch.minimum(s * A, s.clamp(.97, 1.04) * A))
    ref = -torch.stack(terms).mean(); g2 = torch.autograd.grad(ref, list(model.parameters()))
    print(loss.item(), ref.item(), max((a - b).abs().max().item() for a, b in zip(g1, g2)))
    assert abs(loss - ref) < 1e-5 and all(torch.allclose(a, b, atol=1e-5) and a.abs().sum() > 0 for a, b in zip(g1, g2))
