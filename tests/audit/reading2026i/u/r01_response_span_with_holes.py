"""Response span from the first trained token, with holes. As in slime (get_response_lengths, sft_rollout): in a several-turn chat the 'response' is everything from the first assistant token to the end of the row, user and tool turns included; loss_mask covers only this span and has zeros inside. Log-probabilities are cut from the end (logits[-n-1:-1]). Looks as if prompts were part of the response; they are masked."""
import math
import torch

FAMILY = "agents"
KIND = "loss"
INPUTS = {"ids": "token ids of whole conversations, [rows, time], all the same length, no padding", "response_length": "number of tokens from the first trained token to the end of the row, [rows]", "loss_mask": "mask of the response span, right-aligned in [rows, time]; zeros inside are user and tool tokens"}
SETTINGS = {}
NOTES = "SFT: mean over trained tokens of each row, then mean over rows (sample mean). Cross-entropy of the trained tokens only. Every row has at least one trained token and response_length < time."

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
    ids = torch.randint(0, 32, (3, 16))
    full = torch.zeros(3, 16)
    for i, spans in enumerate([[(3, 6), (9, 12)], [(2, 4), (5, 8), (11, 16)], [(7, 15)]]):
        for a, b in spans:
            full[i, a:b] = 1
    n = torch.tensor([16 - int(r.nonzero()[0]) for r in full])
    return {"model": TinyLM(), "ids": ids, "response_length": n, "loss_mask": full}


def right(model, batch):
    logits = model(batch["ids"])
    rows = []
    for i, n in enumerate(batch["response_length"].tolist()):
        span = logits[i, -n - 1:-1]
        mask = batch["loss_mask"][i, -n:]
        lp = torch.log_softmax(span, -1).gather(-1, batch["ids"][i, -n:, None])[:, 0]
        rows.append(-(lp * mask).sum() / mask.sum())
    return torch.stack(rows).mean()


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss = right(m, b); loss.backward()
    lg = torch.log_softmax(m(b["ids"]), -1)
    slow = 0.0
    for i in range(3):
        v = [-lg[i, t - 1, b["ids"][i, t]].item() for t in range(1, 16) if b["loss_mask"][i, t]]
        slow += sum(v) / len(v) / 3
    print(loss.item(), slow, m.head.weight.grad.norm().item())
    assert abs(loss.item() - slow) < 1e-5
