"""One prompt, several responses in one row. Prefix sharing (Prefix Grouper, shared-prompt attention for GRPO) writes the
prompt once and lets every response attend to it but not to the others. Positions repeat: each response starts at the
prompt's length. The prompt's last logits predict the first token of every response."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "packing and positions"
KIND = "loss"
INPUTS = {"ids": "prompt, then all responses [1, total]", "segment": "0 for the prompt, 1..G for the responses [total]",
          "positions": "positions; each response goes on from the prompt's last [1, total]", "advantages": "advantage of each response, constant [G]"}
SETTINGS = {}
NOTES = ("REINFORCE over G responses of one prompt: mean over responses of -advantage * mean token log-probability. Equal to "
         "G separate rows prompt + response. Duplicate positions are intended. The logits at the prompt's last token "
         "are used G times. The prompt is not trained itself. Exactly one prompt per row.")


class TinyLM(nn.Module):
    """Embedding with learned positions, one attention layer, head."""
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        rows, time = ids.shape
        if positions is None:
            positions = torch.arange(time).expand(rows, time)
        if mask is None:
            mask = torch.ones(time, time, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(x + self.out(weights @ v))


def make(seed):
    torch.manual_seed(seed)
    prompt, lengths = 5, [4, 6, 3]
    segment = torch.cat([torch.full((n,), i) for i, n in enumerate([prompt] + lengths)])
    positions = torch.cat([torch.arange(prompt)] + [torch.arange(prompt, prompt + n) for n in lengths])[None]
    return {"model": TinyLM(), "batch": {"ids": torch.randint(0, 32, (1, len(segment))), "segment": segment, "positions": positions,
                                         "advantages": torch.tensor([1.0, -0.7, 0.4])}}


def right(model, batch):
    ids, seg = batch["ids"], batch["segment"]
    total, prompt = len(seg), int((seg == 0).sum())
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    mask = causal & ((seg[:, None] == seg[None, :]) | (seg[None, :] == 0))
    logp = model(ids, batch["positions"], mask)[0].log_softmax(-1)
    target = torch.arange(prompt, total)
    first = seg[target] != seg[target - 1]
    source = torch.where(first, torch.full_like(target, prompt - 1), target - 1)
    token_logp = logp[source, ids[0, target]]
    g = seg[target] - 1
    n = len(batch["advantages"])
    mean_logp = torch.zeros(n).index_add(0, g, token_logp) / torch.bincount(g, minlength=n)
    return -(batch["advantages"] * mean_logp).mean()


if __name__ == "__main__":
    d = make(0)
    loss = right(**d)
    loss.backward()
    b, terms = d["batch"], []
    for k in range(1, 4):
        row = torch.cat([b["ids"][0, b["segment"] == 0], b["ids"][0, b["segment"] == k]])[None]
        lp = d["model"](row[:, :-1]).log_softmax(-1).gather(-1, row[:, 1:, None])[0, 4:, 0]
        terms.append(-b["advantages"][k - 1] * lp.mean())
    slow = sum(terms) / 3
    print(loss.item(), slow.item(), d["model"].head.weight.grad.norm().item())
    assert torch.allclose(loss, slow, atol=1e-5) and d["model"].head.weight.grad.norm() > 0
