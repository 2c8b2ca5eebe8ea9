"""Left-padded rows: positions are cumsum(mask) - 1, and padding gets position 1.
transformers prepare_inputs_for_generation and the log-prob code of RLHF trainers: position_ids.masked_fill_(attention_mask == 0, 1). Padding so shares a position with a real token, and a padded query may see itself (a row of the
mask without any key would give nan); neither can reach a real token."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "left-padded token ids, 0 is padding, [rows, time]", "attention_mask": "1 on real tokens, [rows, time]", "prompt_lens": "number of prompt tokens of each row"}
SETTINGS = {}
NOTES = "Cross entropy over completion tokens, mean over all trained tokens of all rows. Prompt and padding are context or nothing. The value at padding positions never enters. All parameters used (the embedding of the padding id gets no gradient)."

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, mask, plen = torch.randint(1, 29, (4, 14), generator=g), torch.ones(4, 14, dtype=torch.long), []
    for r in range(4):
        pad = int(torch.randint(0, 6, (1,), generator=g))
        ids[r, :pad] = 0; mask[r, :pad] = 0
        plen.append(int(torch.randint(2, 5, (1,), generator=g)))
    return {"model": TinyLM(), "ids": ids, "attention_mask": mask, "prompt_lens": torch.tensor(plen)}


def right(model, batch):
    ids, mask = batch["ids"], batch["attention_mask"]
    count = mask.cumsum(1)
    pos = (count - 1).masked_fill(mask == 0, 1)
    T = ids.shape[1]
    allowed = torch.ones(T, T, dtype=torch.bool).tril() & mask[:, None, :].bool() | torch.eye(T, dtype=torch.bool)
    logp = model(ids, pos, allowed)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    train = ((count > batch["prompt_lens"][:, None]) & mask.bool())[:, 1:]
    return -(logp * train).sum() / train.sum()


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss = right(m, d); loss.backward()
    total, n = 0.0, 0
    for r in range(4):
        x = d["ids"][r][d["attention_mask"][r].bool()][None]
        p = int(d["prompt_lens"][r])
        total = total + F.cross_entropy(m(x)[0, p - 1:-1], x[0, p:], reduction="sum"); n += x.shape[1] - p
    print("padded", loss.item(), "unpadded", (total / n).item(), "gradient", m.head.weight.grad.norm().item())
    assert torch.allclose(loss, total / n, atol=1e-5)
