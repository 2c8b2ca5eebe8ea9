"""Position ids of each row start at a random number, not at 0, and differ at every call of the data.
Right: rotary attention depends on differences of positions only, so a common offset for the whole row changes nothing; it is used to have large positions covered in training."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "offset": "random start position of each row, 0 to 1000, [rows]", "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {}
NOTES = "Next-token cross entropy, mean over trained tokens of all rows. Positions only enter through rotary embeddings of queries and keys."


class RotaryLM(nn.Module):
    def __init__(self, V=32, D=16):
        super().__init__()
        self.emb, self.qkv, self.out = nn.Embedding(V, D), nn.Linear(D, 3 * D, bias=False), nn.Linear(D, V)

    def rot(self, x, pos):
        d = x.shape[-1] // 2
        a = pos[..., None].double() * (100.0 ** (-torch.arange(d, dtype=torch.float64) / d))
        c, s = a.cos().to(x.dtype), a.sin().to(x.dtype)
        u, v = x[..., :d], x[..., d:]
        return torch.cat([u * c - v * s, u * s + v * c], -1)

    def forward(self, ids, pos):
        h = self.emb(ids)
        q, k, v = self.qkv(h).chunk(3, -1)
        q, k = self.rot(q, pos), self.rot(k, pos)
        return self.out(h + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])


def right(model, batch):
    ids = batch["ids"]
    pos = batch["offset"][:, None] + torch.arange(ids.shape[1])[None]
    nll = F.cross_entropy(model(ids, pos)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    m = batch["loss_mask"][:, 1:].flatten()
    return (nll * m).sum() / m.sum()


def make(seed):
    torch.manual_seed(seed)
    return {"model": RotaryLM(), "ids": torch.randint(0, 32, (3, 10)), "offset": torch.randint(0, 1000, (3,)), "loss_mask": (torch.rand(3, 10) < 0.7).float()}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    a = right(m, x)
    b = right(m, {**x, "offset": torch.zeros(3, dtype=torch.long)})
    a.backward()
    print("offset", a.item(), "from zero", b.item(), "gradient", m.qkv.weight.grad.norm().item())
    assert abs((a - b).item()) < 1e-5 and m.qkv.weight.grad.norm() > 0
