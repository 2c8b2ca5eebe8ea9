"""Robust DPO (Chowdhury et al. 2024). The flipped term enters with a PLUS log-sigmoid (i.e. the opposite sign of label smoothing) and the whole is divided by 1 - 2 eps; right: it is the unbiased estimate of the clean loss under label noise eps, and may be negative."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"chosen_ids": "[pairs, time]", "chosen_mask": "1 on completion", "rejected_ids": "[pairs, time]", "rejected_mask": "1 on completion",
          "ref_chosen": "summed reference log-probs, [pairs]", "ref_rejected": "same for rejected, [pairs]"}
SETTINGS = {"beta": "0.1", "eps": "rate of flipped labels, 0.1; must be below 0.5 because 1 - 2 eps divides"}
NOTES = "DPO family; sum over tokens, mean over pairs. Can be negative. Reference constants."
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
    model, ids, mask = base_rows(seed, rows=8)
    return {"model": model, "chosen_ids": ids[:4], "chosen_mask": mask[:4], "rejected_ids": ids[4:], "rejected_mask": mask[4:],
            "ref_chosen": -12 + torch.randn(4), "ref_rejected": -12 + torch.randn(4)}


def right(model, batch, beta=0.1, eps=0.1):
    s = lambda k: (token_logps(model, batch[k + "_ids"]) * batch[k + "_mask"][:, 1:]).sum(1) - batch["ref_" + k]
    h = beta * (s("chosen") - s("rejected"))
    return ((-(1 - eps) * F.logsigmoid(h) + eps * F.logsigmoid(-h)) / (1 - 2 * eps)).mean()


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss = right(model, b); g = flat_grad(model, loss)
    # unbiased: flip each label with probability eps, the expected loss is plain DPO
    swap = {k: b[k.replace("chosen", "X").replace("rejected", "chosen").replace("X", "rejected")] for k in b}
    mixed = 0.9 * loss + 0.1 * right(model, swap)
    dpo = right(model, b, eps=0.0)
    assert torch.allclose(mixed, dpo, atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), "expected under noise", mixed.item(), "plain DPO", dpo.item(), "grad", g.norm().item())
