"""One prompt, several answers, one row. Prefix sharing (for DPO arXiv 2410.20305; the same for GRPO groups): the row is
prompt, answer 1, answer 2, ...; positions of every answer restart after the prompt, so they repeat, and answers see the
prompt and themselves only. The first token of every answer is predicted from the same logits, those of the last prompt
token, which lie far to the left of it and not one column before it."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"prompt": "prompt ids, [rows, P]", "answers": "G sampled answers per prompt, [rows, G, C]",
          "answer_mask": "1 = real answer token, padding at the end, [rows, G, C]", "advantages": "[rows, G]"}
SETTINGS = {}
NOTES = ("REINFORCE: minus advantage times log probability, mean over real answer tokens of all rows. Equal to running every "
         "prompt-answer pair as a row of its own. advantages are constants. All parameters used.")


class TinyLM(nn.Module):
    """One attention layer; `positions` [rows, time], `allowed` bool [rows, time, time] (default: causal)."""

    def __init__(self, vocab=32, width=16, max_pos=96):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allowed=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t).expand(ids.shape)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool).tril()
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(F.gelu(x + self.out(s.softmax(-1) @ v)))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lens = torch.randint(1, 6, (3, 4), generator=g)
    return {"model": TinyLM(), "prompt": torch.randint(1, 32, (3, 6), generator=g),
            "answers": torch.randint(1, 32, (3, 4, 5), generator=g),
            "answer_mask": (torch.arange(5) < lens[..., None]).float(), "advantages": torch.randn(3, 4, generator=g)}


def right(model, batch):
    prompt, answers, mask = batch["prompt"], batch["answers"], batch["answer_mask"]
    b, p = prompt.shape
    _, n, c = answers.shape
    ids = torch.cat([prompt, answers.reshape(b, n * c)], 1)
    segment = torch.cat([torch.zeros(p), 1 + torch.arange(n).repeat_interleave(c)])
    pos = torch.cat([torch.arange(p), p + torch.arange(c).repeat(n)])
    allowed = ((segment[None] == 0) | (segment[None] == segment[:, None])) & (pos[None] <= pos[:, None])
    logp = model(ids, pos.expand(b, -1), allowed).log_softmax(-1)
    first = logp[:, p - 1][:, None, None].expand(-1, n, 1, -1)
    inside = logp[:, p:].reshape(b, n, c, -1)[:, :, :-1]
    lp = torch.cat([first, inside], 2).gather(-1, answers[..., None])[..., 0]
    return -(batch["advantages"][..., None] * lp * mask).sum() / mask.sum()


if __name__ == "__main__":
    c = make(0)
    m = c.pop("model")
    loss = right(m, c)
    tot = 0
    for i in range(3):
        for j in range(4):
            x = torch.cat([c["prompt"][i], c["answers"][i, j]])
            lp = m(x[None])[0].log_softmax(-1)
            for t in range(5):
                if c["answer_mask"][i, j, t]:
                    tot = tot - c["advantages"][i, j] * lp[5 + t, x[6 + t]]
    ref = tot / c["answer_mask"].sum()
    loss.backward()
    print("loss", loss.item(), "separate rows", ref.item())
    assert abs(loss - ref) < 1e-5 and all(p.grad.abs().sum() > 0 for p in m.parameters())
