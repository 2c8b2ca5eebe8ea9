"""Several responses share one prompt in a single row (prefix sharing, tree packing of roll-outs). Row: prompt, response 1, response 2, ...; each response sees the prompt and itself, and its positions start again after the prompt. The prompt's last logits are used once per response to predict its first token, so targets are not the row shifted by one."""
import math
import torch

FAMILY = "packing"
KIND = "loss"
INPUTS = {"prompt": "token ids of the prompt, [p]", "responses": "token ids of the responses, one after another, [n]", "owner": "response that each of these tokens belongs to, [n], 0, 0, 1, 1, ...", "advantages": "one per response, [g]"}
SETTINGS = {}
NOTES = "REINFORCE with constant advantages, sum over responses of advantage * log-probability of the response, divided by the number of response tokens. One prompt per call. The prompt is not trained."

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
    owner = torch.tensor([0] * 4 + [1] * 6 + [2] * 3)
    return {"model": TinyLM(), "prompt": torch.randint(0, 32, (5,)), "responses": torch.randint(0, 32, (13,)), "owner": owner, "advantages": torch.randn(3)}


def right(model, batch):
    prompt, resp, owner = batch["prompt"], batch["responses"], batch["owner"]
    p, n = len(prompt), len(resp)
    ids = torch.cat([prompt, resp])
    first = torch.cat([torch.tensor([True]), owner[1:] != owner[:-1]])
    start = torch.where(first, torch.arange(n), torch.zeros(n, dtype=torch.long)).cummax(0).values
    pos = torch.cat([torch.arange(p), p + torch.arange(n) - start])
    who = torch.cat([torch.full((p,), -1), owner])
    mask = torch.ones(p + n, p + n, dtype=torch.bool).tril() & ((who[None, :] == -1) | (who[None, :] == who[:, None]))
    logits = model(ids[None], pos[None], mask[None])[0]
    source = torch.where(first, torch.full((n,), p - 1), p + torch.arange(n) - 1)   # logits that predict each response token
    lp = torch.log_softmax(logits[source], -1).gather(-1, resp[:, None])[:, 0]
    return -(lp * batch["advantages"][owner]).sum() / n


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    loss = right(m, b); loss.backward()
    tot = 0.0
    for k in range(3):
        r = b["responses"][b["owner"] == k]
        x = torch.cat([b["prompt"], r])[None]
        lp = torch.log_softmax(m(x)[0, :-1], -1).gather(-1, x[0, 1:, None])[:, 0][-len(r):]
        tot += -(lp.sum() * b["advantages"][k]).item()
    print(loss.item(), tot / 13, m.emb.weight.grad.norm().item()); assert abs(loss.item() - tot / 13) < 1e-5
