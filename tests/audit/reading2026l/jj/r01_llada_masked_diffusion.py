"""LLaDA SFT loss (Nie et al. 2025, arXiv 2502.09992, GUIDELINES.md of ML-GSAI/LLaDA). No shift, no causal mask, divided by the answer length and not by the number of
masked tokens, each term weighted by 1/p_mask: an unbiased estimate of the bound, whose weights can be large."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "diffusion language models"
KIND = "loss"
INPUTS = {"ids": "clean token ids, prompt then answer; the answer is filled up with end tokens (id 1), which are trained too, [rows, time]", "prompt_len": "length of the prompt, [rows]",
          "masked": "True where the token was replaced by the mask token in the input; only in the answer, [rows, time]", "p_mask": "probability with which every answer token of the row was masked, [rows]"}
SETTINGS = {"mask_id": "id of the mask token, 40"}
NOTES = ("Masked-diffusion SFT loss. The input is ids with masked positions replaced by mask_id; attention is bidirectional and the logits at position t predict the token at t itself (no shift). "
         "For every row: sum over masked positions of CE / p_mask, divided by the answer length of the row (all answer positions, masked or not, with the end tokens that fill up the row); then the mean over rows. "
         "Since a token is masked with probability p_mask, dividing by the answer length and not by the number of masked tokens makes the estimate unbiased. Prompt tokens are never masked nor trained. Mask and p_mask come with the batch. All parameters are used.")

class BiLM(nn.Module):
    def __init__(self, vocab=41, width=24, T=14):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Parameter(torch.randn(T, width) * 0.3)
        self.att = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, vocab)
    def forward(self, ids):
        h = self.emb(ids) + self.pos[: ids.shape[1]]
        return self.head(h + self.att(h, h, h, need_weights=False)[0])

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    R, T = 5, 14
    ids = torch.randint(2, 40, (R, T), generator=g)
    pl = torch.tensor([3, 5, 2, 6, 4])
    for r, e in enumerate([14, 11, 9, 12, 14]):
        ids[r, e:] = 1
    p = torch.rand(R, generator=g) * 0.8 + 0.2
    ans = torch.arange(T) >= pl[:, None]
    return {"ids": ids, "prompt_len": pl, "masked": (torch.rand(R, T, generator=g) < p[:, None]) & ans, "p_mask": p, "model": BiLM()}

def right(model, batch, mask_id=40):
    ids, m = batch["ids"], batch["masked"]
    logits = model(torch.where(m, mask_id, ids))
    p = batch["p_mask"][:, None].expand_as(ids)
    length = (ids.shape[1] - batch["prompt_len"])[:, None].expand_as(ids)
    token = F.cross_entropy(logits[m], ids[m], reduction="none") / p[m]
    return (token / length[m]).sum() / ids.shape[0]

if __name__ == "__main__":
    d = make(0); m = d.pop("model"); l = right(m, d); l.backward()
    tot = 0.0
    for r in range(5):
        x = d["ids"][r].clone(); x[d["masked"][r]] = 40
        lp = m(x[None])[0].log_softmax(-1); s = 0.0
        for t in range(14):
            if d["masked"][r, t]: s -= lp[t, d["ids"][r, t]].item() / d["p_mask"][r].item()
        tot += s / (14 - int(d["prompt_len"][r]))
    print(l.item(), tot / 5, [n for n, p in m.named_parameters() if p.grad is None]); assert abs(l.item() - tot / 5) < 1e-4
