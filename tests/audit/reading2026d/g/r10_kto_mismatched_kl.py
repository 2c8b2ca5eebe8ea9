"""KTO (Ethayarajh et al. 2024, TRL). The reference point is a KL estimate over MISMATCHED pairs (prompt i with the completion of row i+1), detached and clamped at zero; desirable and undesirable rows are unpaired and need not be balanced."""
FAMILY = "preference"
KIND = "loss"
INPUTS = {"ids": "prompt + completion, [rows, time]", "loss_mask": "1 on completion tokens, [rows, time]", "ref_logps": "summed reference log-prob of each completion, [rows]",
          "kl_ids": "prompt + completion of the next row, [rows, time]", "kl_mask": "1 on its completion tokens, [rows, time]", "kl_ref_logps": "summed reference log-prob of kl_ids, [rows]",
          "label": "True for desirable, [rows]"}
SETTINGS = {"beta": "0.1", "w_good": "weight of desirable rows, 1.0", "w_bad": "weight of undesirable rows, 1.33"}
NOTES = ("Preference loss, unpaired; mean over all rows (weighted rows are not renormalised). The KL point has no gradient. Reference values constants. "
         "The KL point is shared by the batch, so a split of the batch changes the loss. Sum of log-probs, no length normalisation.")
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


def seq(model, ids, mask):
    return (token_logps(model, ids) * mask[:, 1:]).sum(1)


def make(seed):
    model, ids, mask = base_rows(seed)
    comp, cm = ids[:, 3:].roll(-1, 0), mask[:, 3:].roll(-1, 0)
    kl_ids = torch.cat([ids[:, :3], comp], 1); kl_mask = torch.cat([mask[:, :3], cm], 1)
    with torch.no_grad():
        ref = seq(model, ids, mask) + torch.randn(6); klref = seq(model, kl_ids, kl_mask) - 0.4 + 0.5 * torch.randn(6)
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_logps": ref, "kl_ids": kl_ids, "kl_mask": kl_mask, "kl_ref_logps": klref,
            "label": torch.tensor([True, False, True, True, False, True])}


def right(model, batch, beta=0.1, w_good=1.0, w_bad=1.33):
    lr = seq(model, batch["ids"], batch["loss_mask"]) - batch["ref_logps"]
    with torch.no_grad():
        z = (seq(model, batch["kl_ids"], batch["kl_mask"]) - batch["kl_ref_logps"]).mean().clamp(min=0)
    good = w_good * (1 - torch.sigmoid(beta * (lr - z)))
    bad = w_bad * (1 - torch.sigmoid(beta * (z - lr)))
    return torch.where(batch["label"], good, bad).mean(), {"kl_point": z.item()}


if __name__ == "__main__":
    b = make(0); model = b.pop("model")
    loss, met = right(model, b)
    tot = 0.0
    for i in range(6):
        lr = seq(model, b["ids"][i:i + 1], b["loss_mask"][i:i + 1])[0] - b["ref_logps"][i]
        s = torch.sigmoid(0.1 * (lr - met["kl_point"]))
        tot = tot + ((1 - s) if b["label"][i] else 1.33 * s) / 6
    g = flat_grad(model, loss)
    assert torch.allclose(loss, tot, atol=1e-5) and torch.allclose(g, flat_grad(model, tot), atol=1e-5) and g.norm() > 0
    print("loss", loss.item(), met, "grad", g.norm().item())
