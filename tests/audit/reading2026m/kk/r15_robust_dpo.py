"""Robust DPO (Chowdhury et al. 2024, arXiv 2403.00409; TRL loss_type='robust'). The loss of the flipped pair is subtracted, not added as in conservative DPO (label smoothing), and the whole is divided by 1 - 2*eps; the loss can be negative, has no lower bound, and its
gradient does not vanish for pairs the policy already ranks right."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "preference losses"
KIND = "loss"
INPUTS = {
    "ids": "token ids, [2*pairs, time]; rows 2i and 2i+1 are the chosen and the rejected answer of pair i",
    "loss_mask": "1 for the tokens of the completion, [2*pairs, time]; the first column is 0",
    "ref_logps": "summed log-probability of each completion under the reference model, [2*pairs], constant",
}
SETTINGS = {"beta": "strength, 0.3", "flip": "assumed probability that a preference label is flipped, 0.2 (below 0.5)"}
NOTES = (
    "Robust DPO. h = beta*((logp_chosen - ref_chosen) - (logp_rejected - ref_rejected)) with summed completion log-probabilities; token t is predicted from position t-1. Pair loss ((1-flip)*(-logsigmoid(h)) - flip*(-logsigmoid(-h)))/(1-2*flip): an unbiased estimate of the DPO loss on clean labels when a share flip of the labels was swapped at random, "
    "that is (1-flip)*loss(pair) + flip*loss(swapped pair) = -logsigmoid(h). It may be negative. Mean over the pairs. ref_logps are constants. All parameters are used. Needs an even number of rows."
)


class Tiny(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def _sum_logp(model, ids, mask):
    lp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (lp * mask[:, 1:]).sum(1)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, mask = Tiny(), torch.zeros(8, 12)
    ids = torch.randint(0, 23, (8, 12), generator=g)
    ids[1::2, :4] = ids[0::2, :4]
    for r in range(8):
        mask[r, 4:int(torch.randint(7, 13, (1,), generator=g))] = 1
    with torch.no_grad():
        ref = _sum_logp(model, ids, mask) + 2 * torch.randn(8, generator=g)
    return {"model": model, "ids": ids, "loss_mask": mask, "ref_logps": ref}


def right(model, batch, beta=0.3, flip=0.2):
    x = (_sum_logp(model, batch["ids"], batch["loss_mask"]) - batch["ref_logps"]).view(-1, 2)
    h = beta * (x[:, 0] - x[:, 1])
    loss = ((1 - flip) * -F.logsigmoid(h) - flip * -F.logsigmoid(-h)) / (1 - 2 * flip)
    return loss.mean()


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        model = d.pop("model")
        loss = right(model, d)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        swap = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])
        flipped = right(model, {k: v[swap] for k, v in d.items()})
        x = (_sum_logp(model, d["ids"], d["loss_mask"]) - d["ref_logps"]).detach()
        clean = -F.logsigmoid(0.3 * (x[0::2] - x[1::2])).mean()
        mix = 0.8 * loss.item() + 0.2 * flipped.item()
        print("seed", seed, "loss %.5f |grad| %.4f; 0.8*loss + 0.2*swapped %.6f, clean DPO %.6f" % (loss.item(), norm, mix, clean))
        assert abs(mix - clean.item()) < 1e-5 and norm > 0 and all(p.grad is not None for p in model.parameters())
