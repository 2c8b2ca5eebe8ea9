"""Multi-turn agent loss where tool outputs stay in the context but not in the loss, and every assistant turn counts the same: mean over the tokens of a turn, then over all turns of the batch. A row with many turns weighs more than one with few, on purpose (turn = one decision of the agent, as in turn-level credit assignment)."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def token_logps(model, ids):
    """log p(ids[:, t] | ids[:, :t]) for t = 1 .. T-1, shape [rows, T-1]."""
    lp = model(ids)[:, :-1].log_softmax(-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def response_mask(rows, T, prompt=3):
    """1 on the response tokens; ragged ends, at least two tokens each."""
    m = torch.zeros(rows, T)
    for i in range(rows):
        m[i, prompt:int(torch.randint(prompt + 2, T + 1, (1,)))] = 1
    return m

FAMILY = "agents with tools"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "turn": "0 for prompt, tool output and padding; k for a token of the k-th assistant turn, [rows, time]",
          "turn_advantages": "advantage of turn k of the row at column k-1, [rows, max_turns]"}
SETTINGS = {"max_turns": "columns of turn_advantages, 3"}
NOTES = "Mean over tokens of a turn, then mean over all turns of all rows (not mean over rows). Advantages are constants. Tool tokens are read but not trained. All parameters used; any number of rows."


def make(seed):
    torch.manual_seed(seed)
    turn = torch.zeros(3, 18, dtype=torch.long)
    for i, n in enumerate([1, 3, 2]):
        t = 2
        for k in range(1, n + 1):
            ln = int(torch.randint(1, 4, (1,)))
            turn[i, t:t + ln] = k
            t += ln + 2                      # two tool tokens between turns
    return {"model": TinyLM(), "ids": torch.randint(0, 31, (3, 18)), "turn": turn, "turn_advantages": torch.randn(3, 3)}


def right(model, batch, max_turns=3):
    lp = token_logps(model, batch["ids"])
    one = F.one_hot(batch["turn"][:, 1:], max_turns + 1)[..., 1:].to(lp.dtype)      # [rows, time-1, turns]
    count = one.sum(1)
    per_turn = (lp[..., None] * one).sum(1) / count.clamp(min=1)
    exists = (count > 0).to(lp.dtype)
    return -(per_turn * batch["turn_advantages"] * exists).sum() / exists.sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lp = token_logps(model, d["ids"]).detach()
    terms = []
    for i in range(3):
        for k in (1, 2, 3):
            idx = [t for t in range(1, 18) if d["turn"][i, t] == k]
            if idx:
                terms.append(-float(d["turn_advantages"][i, k - 1]) * sum(float(lp[i, t - 1]) for t in idx) / len(idx))
    want = sum(terms) / len(terms)
    assert len(terms) == 6 and abs(float(loss) - want) < 1e-4 and not dead
    print("ok", float(loss), want)
