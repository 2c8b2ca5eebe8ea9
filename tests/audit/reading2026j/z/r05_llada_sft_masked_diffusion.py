"""Masked-diffusion SFT (LLaDA, Nie et al. 2025): no shift, bidirectional model, cross-entropy only where the answer token was replaced by [MASK], each
divided by its masking probability p and by the answer LENGTH (not by the count of masked tokens); the 1/p makes the estimate an unbiased likelihood bound."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "sft and pre-training losses"
KIND = "loss"
INPUTS = {"ids": "clean token ids, [rows, time]; prompt, answer, then EOS tokens as padding that ARE part of the answer", "prompt_len": "tokens of the prompt, [rows]",
          "t": "diffusion time of the row, uniform in [0,1], [rows]", "u": "uniform noise per token, [rows, time]; a token is masked where u < p"}
SETTINGS = {"mask_id": "id of [MASK], 24 (last of the vocabulary; never in clean data)", "eps": "lower bound of the masking probability, 0.001"}
NOTES = ("Mean over rows of (sum over masked answer tokens of CE / p) / answer length, where p = (1-eps) t + eps. The trailing EOS padding counts as answer, as LLaDA does. "
         "t and u are the random numbers of the batch (constants). Prediction at position i is of token i: no shift. A row where nothing was masked gives 0. The model attends to both sides. All parameters are used.")

class Bi(nn.Module):
    def __init__(self, V=25, d=16, T=16):
        super().__init__()
        self.emb = nn.Embedding(V, d); self.pos = nn.Parameter(0.1 * torch.randn(T, d)); self.qkv = nn.Linear(d, 3 * d); self.o = nn.Linear(d, d); self.head = nn.Linear(d, V)
    def forward(self, ids):
        x = self.emb(ids) + self.pos[: ids.shape[1]]
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + self.o(F.scaled_dot_product_attention(q, k, v)))     # bidirectional on purpose

def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(1, 24, (4, 12)); ids[1, 9:] = 0; ids[3, 7:] = 0          # 0 = EOS, also the padding
    return {"model": Bi(), "ids": ids, "prompt_len": torch.tensor([2, 5, 3, 4]), "t": torch.rand(4), "u": torch.rand(4, 12)}

def right(model, batch, mask_id=24, eps=1e-3):
    ids = batch["ids"]; B, T = ids.shape
    p = ((1 - eps) * batch["t"] + eps)[:, None].expand(B, T)
    answer = torch.arange(T, device=ids.device)[None] >= batch["prompt_len"][:, None]
    masked = (batch["u"] < p) & answer                                            # prompts are never noised
    noisy = torch.where(masked, mask_id, ids)
    logits = model(noisy)
    length = answer.sum(1, keepdim=True).expand(B, T)
    ce = F.cross_entropy(logits[masked].float(), ids[masked], reduction="none")
    return (ce / p[masked] / length[masked]).sum() / B

if __name__ == "__main__":
    b = make(0); m = b.pop("model"); l = right(m, b); l.backward()
    tot = 0.0
    for i in range(4):
        p = 0.999 * b["t"][i].item() + 0.001; pl = int(b["prompt_len"][i]); x = b["ids"][i].clone()
        hit = [j for j in range(pl, 12) if b["u"][i, j] < p]
        for j in hit: x[j] = 24
        lp = m(x[None])[0].log_softmax(-1)
        tot += sum(-lp[j, b["ids"][i, j]].item() for j in hit) / p / (12 - pl) / 4
    print(l.item(), tot, "grad", sum(p.grad.norm().item() for p in m.parameters()))
    assert abs(l.item() - tot) < 1e-4 and all(p.grad.norm() > 0 for p in m.parameters())
