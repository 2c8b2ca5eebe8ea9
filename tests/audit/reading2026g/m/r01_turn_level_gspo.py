"""Turn-level sequence ratio for a multi-turn agent. The importance ratio is neither per token nor per answer: each assistant turn has one ratio, the geometric mean over its own tokens (GSPO, with the turn as the "sequence", as in turn-level PPO/GSPO variants for agents). Tool tokens between the turns enter no ratio, and a turn of 2 tokens weighs as much as one of 20."""
FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0",
          "turn_ids": "[rows, time], 0 for prompt, tool output and padding; k >= 1 for the tokens of the k-th assistant turn",
          "old_logprobs": "[rows, time], entry t is the log-probability of ids[:, t] under the sampling policy; 0 where turn_ids is 0",
          "advantages": "[rows, time], one value per turn, repeated on the tokens of that turn"}
SETTINGS = {"clip_low": "3e-3 below 1", "clip_high": "4e-3 above 1"}
NOTES = "PPO-family clipped loss. Reduction: mean over the assistant turns of all rows (not tokens, not rows). old_logprobs and advantages are constants; entries outside the turns are not read. Each row has at least one turn and token 0 is never in a turn. All parameters of the model are used."
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
    model = TinyLM()
    B, T = 4, 20
    ids = torch.randint(1, 32, (B, T), generator=g)
    turn = torch.zeros(B, T, dtype=torch.long)
    for b in range(B):
        t = 3
        for k in range(1, 2 + b % 3 + 1):
            n = int(torch.randint(1, 5, (1,), generator=g))
            turn[b, t:min(t + n, T - 1)] = k
            t += n + 1 + int(torch.randint(0, 2, (1,), generator=g))
        ids[b, min(t, T):] = 0
    adv_turn = torch.randn(B, 8, generator=g)
    adv = adv_turn.gather(1, turn) * (turn > 0)
    with torch.no_grad():
        lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    old = torch.zeros(B, T)
    old[:, 1:] = lp + 0.01 * torch.randn(B, T - 1, generator=g)
    return {"model": model, "ids": ids, "turn_ids": turn, "old_logprobs": old * (turn > 0), "advantages": adv}


def right(model, batch, clip_low=3e-3, clip_high=4e-3):
    ids, turn = batch["ids"], batch["turn_ids"][:, 1:]
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    member = nn.functional.one_hot(turn, int(turn.max()) + 1)[..., 1:].to(lp.dtype)      # [B, T-1, K]
    count = member.sum(1)                                                            # [B, K]
    exists = count > 0
    size = count.clamp(min=1)
    diff = torch.where(turn > 0, lp - batch["old_logprobs"][:, 1:], torch.zeros_like(lp))
    ratio = (torch.einsum("bt,btk->bk", diff, member) / size).exp()
    adv = torch.where(turn > 0, batch["advantages"][:, 1:], torch.zeros_like(lp))
    adv = torch.einsum("bt,btk->bk", adv, member) / size
    per_turn = -torch.minimum(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
    return (per_turn * exists).sum() / exists.sum().clamp(min=1)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    loss.backward()
    terms = []
    for r in range(len(b["ids"])):
        lp = m(b["ids"][r:r + 1])[0].log_softmax(-1)
        for k in range(1, int(b["turn_ids"][r].max()) + 1):
            pos = [t for t in range(20) if b["turn_ids"][r, t] == k]
            d = sum(lp[t - 1, b["ids"][r, t]] - b["old_logprobs"][r, t] for t in pos) / len(pos)
            A, s = b["advantages"][r, pos[0]], d.exp()
            terms.append(-min(s * A, s.clamp(1 - 3e-3, 1 + 4e-3) * A))
    ref = sum(terms) / len(terms)
    gn = sum(p.grad.norm() for p in m.parameters())
    print(loss.item(), ref.item(), "grad", gn.item())
    assert torch.allclose(loss, ref, atol=1e-6) and gn > 0 and all(p.grad is not None for p in m.parameters())
