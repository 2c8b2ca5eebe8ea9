"""Prefix LM: prompt tokens see the whole prompt, also what follows them, and only completion tokens are causal. Logits at
prompt places depend on later tokens, but no prompt token is a target except through the last prompt place, which predicts
the first completion token and sees nothing of the completion. A later token thus never leaks into a trained prediction."""
FAMILY = "packing"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "prompt and completion, right-padded, [rows, time]", "prompt_length": "tokens of the prompt, [rows]",
          "length": "real tokens, [rows]"}
SETTINGS = {}
NOTES = ("Cross entropy of the completion tokens, mean over all completion tokens of all rows. Bidirectional attention inside "
         "the prompt by design.")


class TinyLM(nn.Module):
    """One causal attention layer; positions are learned."""

    def __init__(self, vocab=29, width=16, length=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, attention_mask=None, position_ids=None, allowed=None):
        rows, time = ids.shape
        if position_ids is None:
            position_ids = torch.arange(time).expand(rows, time)
        x = self.tok(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        see = torch.ones(time, time, dtype=torch.bool).tril().expand(rows, time, time)
        if allowed is not None:
            see = allowed
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, :]
        score = score.masked_fill(~see, -1e9)
        return self.head(x + self.out(torch.tanh(score.softmax(-1) @ v)))


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(), "ids": torch.randint(0, 29, (4, 14)), "prompt_length": torch.tensor([4, 7, 5, 6]),
            "length": torch.tensor([14, 12, 9, 13])}


def right(model, batch):
    ids, n, p = batch["ids"], batch["length"], batch["prompt_length"]
    time = ids.shape[1]
    at = torch.arange(time)
    causal = at[None, :, None] >= at[None, None, :]
    inside = (at[None, :, None] < p[:, None, None]) & (at[None, None, :] < p[:, None, None])
    allowed = (causal | inside) & (at[None, None, :] < n[:, None, None])
    logits = model(ids, allowed=allowed)
    train = (at[None, 1:] >= p[:, None]) & (at[None, 1:] < n[:, None])
    return F.cross_entropy(logits[:, :-1][train], ids[:, 1:][train])


if __name__ == "__main__":
    data = make(0)
    model = data.pop("model")
    loss = right(model, data)
    loss.backward()
    total, count = 0.0, 0
    for r in range(4):
        p, n = data["prompt_length"][r].item(), data["length"][r].item()
        for t in range(p, n):                                    # explicit: predict token t from the tokens before it only
            ids = data["ids"][r:r + 1, :t]
            see = torch.ones(t, t, dtype=torch.bool).tril()
            see[:p, :p] = True
            total -= model(ids, allowed=see[None])[0, -1].log_softmax(-1)[data["ids"][r, t]].item()
            count += 1
    print(loss.item(), total / count, "grad", sum(q.grad.norm() for q in model.parameters()).item())
    assert abs(loss.item() - total / count) < 1e-4
