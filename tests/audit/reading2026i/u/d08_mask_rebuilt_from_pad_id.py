"""The adapter discards attention_mask and rebuilds it from pad_id. AI-Hypercomputer/maxtext#5198, https://github.com/AI-Hypercomputer/maxtext/pull/5198, 2026.
The RL model adapter accepted attention_mask but computed its own mask as ids != pad_id. If the batch had been padded with another id (or pad_id was unset), padding counted as text.
Left padding was attended to and shifted the positions: logits were well formed, log-probabilities wrong."""
import math
import torch

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], prompts left-padded with id 0, completions right-padded with id 0", "attention_mask": "1 for text, 0 for padding, [rows, time]", "completion_mask": "1 where the token is trained, [rows, time]", "advantages": "one per row, [rows]"}
SETTINGS = {"pad_id": "pad id of the tokenizer that the adapter was built with, 2 (its end-of-text token)"}
NOTES = "REINFORCE with constant advantages, mean over trained tokens of all rows. Padding may be on both sides; attention_mask alone says what is padding; positions count text tokens only. Id 0 is an ordinary id that the roll-out side pads with and never occurs in text."


class TinyLM(torch.nn.Module):
    """One causal attention layer with fixed sinusoidal positions; every parameter is used by every forward."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, mask=None):
        b, t = ids.shape
        w = self.emb.embedding_dim
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        if mask is None:
            mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        freq = torch.exp(-torch.arange(0, w, 2).float() / w * math.log(100.0))
        ang = positions.float().unsqueeze(-1) * freq
        x = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(-1, -2) / math.sqrt(w)
        score = score.masked_fill(~mask, -1e9)
        return x + self.out(score.softmax(-1) @ v)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    rows, p, c = 4, 6, 6
    ids = torch.randint(3, 32, (rows, p + c))
    att = torch.ones(rows, p + c, dtype=torch.long)
    for i, (left, rightpad) in enumerate([(0, 2), (3, 0), (1, 1), (4, 3)]):
        att[i, :left] = 0
        if rightpad:
            att[i, -rightpad:] = 0
    ids = ids * att
    comp = att.clone(); comp[:, :p] = 0
    return {"model": model, "ids": ids, "attention_mask": att, "completion_mask": comp, "advantages": torch.randn(rows)}


def _loss(model, batch, text):
    ids, comp = batch["ids"], batch["completion_mask"][:, 1:].float()
    positions = (text.long().cumsum(1) - 1).clamp(min=0)
    t = ids.shape[1]
    mask = torch.ones(t, t, dtype=torch.bool).tril() & (text[:, None, :] == text[:, :, None]).bool()
    lp = torch.log_softmax(model(ids, positions, mask)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(lp * batch["advantages"][:, None] * comp).sum() / comp.sum()


def broken(model, batch, pad_id=2):
    return _loss(model, batch, batch["ids"] != pad_id)


def right(model, batch, pad_id=2):
    return _loss(model, batch, batch["attention_mask"].bool())


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    lb, lr = broken(m, b), right(m, b)
    lr.backward()
    tot, n = 0.0, 0
    for i in range(4):                                 # each row alone, without padding
        keep = b["attention_mask"][i] == 1
        x, c = b["ids"][i][keep][None], b["completion_mask"][i][keep][1:].float()
        lp = torch.log_softmax(m(x)[:, :-1], -1).gather(-1, x[:, 1:, None])[0, :, 0]
        tot += -(lp * c).sum().item() * b["advantages"][i].item(); n += c.sum().item()
    print("broken", lb.item(), "right", lr.item(), "row by row", tot / n)
    assert abs(lr.item() - tot / n) < 1e-5 < 1e-4 < abs(lb.item() - lr.item())
