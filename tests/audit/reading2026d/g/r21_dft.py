"""Dynamic fine-tuning (DFT, Wu et al. 2025). Cross-entropy is multiplied with the model's own DETACHED probability of the target; it looks like a forgotten normaliser, but removes the 1/p of the SFT gradient."""
FAMILY = "supervised"
KIND = "loss"
INPUTS = {"ids": "[rows, time]", "loss_mask": "1 on trained tokens"}
SETTINGS = {}
NOTES = "Supervised; mean over trained tokens of all rows, weights not renormalised. The gradient is that of minus the mean target probability; the value is not. Uses all parameters."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Tiny(nn.Module):
    """Causal recurrent model: ids [rows, time] -> logits [rows, time, V]."""

    def __init__(self, out=V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, out, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]

    def forward(self, ids):
        return self.head(self.hidden(ids))


def token_logps(model, ids):
    """log p(ids[:, t+1] | ids[:, :t+1]), shape [rows, time-1]."""
    lp = F.log_softmax(model(ids)[:, :-1].float(), dim=-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def base_rows(seed, rows=6, time=10, prompt=3):
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(1, V, (rows, time))
    length = torch.randint(prompt + 2, time + 1, (rows, 1))
    pos = torch.arange(time)[None]
    ids = ids.masked_fill(pos >= length, 0)
    loss_mask = ((pos >= prompt) & (pos < length)).float()
    return model, ids, loss_mask


def flat_grad(model, loss):
    params = list(model.parameters())
    gs = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(params, gs)])


def make(seed):
    model, ids, mask = base_rows(seed)
    return {"model": model, "ids": ids, "loss_mask": mask}


def right(model, batch):
    lp = token_logps(model, batch["ids"]); m = batch["loss_mask"][:, 1:]
    return -(lp.detach().exp() * lp * m).sum() / m.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss); m = b["loss_mask"][:, 1:]
    h = flat_grad(model, -(token_logps(model, b["ids"]).exp() * m).sum() / m.sum())
    assert torch.allclose(g, h, atol=1e-6) and g.norm() > 0
    print("loss", loss.item(), "gap to gradient of -p", (g - h).abs().max().item(), "grad", g.norm().item())
