"""Shared-prefix packing. One prompt and several answers lie in ONE row; the first token of each answer is predicted from the last PROMPT token, not from its left neighbour, and positions restart after the prompt. Right: equal to separate rows."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "prompt, answer 1, answer 2, .. in one row, [rows, time]", "branch": "0 for prompt, k for answer k, -1 padding, [rows, time]", "parent": "index of the token before this one in its own sequence, [rows, time]; 0 for the first token", "position_ids": "position in the own sequence"}
SETTINGS = {}
NOTES = "Cross-entropy; mean over answer tokens of all rows. Prompt tokens are not trained. All parameters used except rows of the position table beyond the longest sequence."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Attn(nn.Module):
    """One-layer attention model. visible: bool [rows, time, time], True where the query may look."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.pos = nn.Embedding(32, D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids, position_ids, visible):
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(1, 2)) / math.sqrt(D)
        a = s.masked_fill(~visible, float("-inf")).softmax(-1)
        return self.head(x + a @ v)


def make(seed):
    torch.manual_seed(seed)
    branch = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3], [0, 0, 0, 0, 1, 1, 2, 2, 2, -1, -1, -1]])
    parent = torch.tensor([[0, 0, 1, 2, 3, 4, 2, 6, 2, 8, 9, 10], [0, 0, 1, 2, 3, 4, 3, 6, 7, 0, 0, 0]])
    pos = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 0, 0]])
    return {"model": Attn(), "ids": torch.randint(1, V, (2, 12)), "branch": branch, "parent": parent, "position_ids": pos}


def right(model, batch):
    br = batch["branch"]
    q, k = br[:, :, None], br[:, None, :]
    t = torch.arange(br.shape[1])
    visible = ((q == k) | (k == 0)) & (t[None, :] <= t[:, None])
    lp = model(batch["ids"], batch["position_ids"], visible).log_softmax(-1)
    src = lp.gather(1, batch["parent"][..., None].expand_as(lp))
    ll = src.gather(-1, batch["ids"][..., None]).squeeze(-1)
    return -ll[br > 0].mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model"); loss = right(model, b); loss.backward(); tot = []
    for i in range(2):
        prompt = b["ids"][i][b["branch"][i] == 0]
        for k in range(1, 4):
            ans = b["ids"][i][b["branch"][i] == k]
            if len(ans):
                s = torch.cat([prompt, ans])[None]; n = s.shape[1]
                lp = model(s, torch.arange(n)[None], torch.ones(1, n, n).tril().bool()).log_softmax(-1)
                tot += [-lp[0, t - 1, s[0, t]] for t in range(len(prompt), n)]
    assert torch.allclose(loss, torch.stack(tot).mean(), atol=1e-5) and model.qkv.weight.grad.norm() > 0
    print("packed", loss.item(), "separate", torch.stack(tot).mean().item())
