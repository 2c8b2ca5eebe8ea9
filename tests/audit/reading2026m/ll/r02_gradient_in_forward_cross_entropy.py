"""Fused linear cross-entropy (Liger kernel, Cut Cross-Entropy): the custom function computes the gradients of hidden states and head already in the FORWARD, chunk by chunk, and
stores them; backward only multiplies by the incoming gradient. No logits enter the autograd graph, and the loops call no .backward()."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "supervised and distillation losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]; token t+1 is the target of position t", "labels": "[rows, time], the token itself where it is trained, -100 elsewhere (not yet shifted)"}
SETTINGS = {"chunk": "number of positions whose logits exist at the same time, 5 (no effect on the result)"}
VALUES = {"chunk": 5}
NOTES = """Next-token cross-entropy, mean over all trained targets of all rows (pooled). Position t predicts labels[:, t+1]; the last position has no target. The head is applied inside a custom
autograd function in chunks of positions; the gradients of hidden states and head weight are computed in the forward and scaled by the incoming gradient in the backward, so any factor
on the loss (accumulation, ranks) is respected. First derivatives only. Identical to F.cross_entropy on the full logits. The head has no bias and is tied to nothing. All parameters are used."""


class _FusedLinearCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, chunk):
        n = (target != -100).sum().clamp(min=1)
        loss, gh, gw = hidden.new_zeros(()), torch.zeros_like(hidden), torch.zeros_like(weight)
        for a in range(0, len(hidden), chunk):
            h, t = hidden[a:a + chunk], target[a:a + chunk]
            keep = (t != -100)
            logits = h @ weight.t()
            lse = logits.logsumexp(-1)
            picked = logits.gather(1, t.clamp(min=0)[:, None])[:, 0]
            loss += ((lse - picked) * keep).sum()
            d = (logits - lse[:, None]).exp()
            d[torch.arange(len(t)), t.clamp(min=0)] -= 1
            d *= keep[:, None] / n
            gh[a:a + chunk] = d @ weight
            gw += d.t() @ h
        ctx.save_for_backward(gh, gw)
        return loss / n

    @staticmethod
    def backward(ctx, g):
        gh, gw = ctx.saved_tensors
        return gh * g, gw * g, None, None


class LM(nn.Module):
    def __init__(self, vocab=27, width=16):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab, bias=False)

    def hidden(self, ids):
        return self.rnn(self.emb(ids))[0]


def make(seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 27, (3, 9))
    labels = ids.clone()
    labels[0, :4] = -100; labels[1, :2] = -100; labels[1, 7:] = -100; labels[2, 3:5] = -100
    return {"model": LM(), "ids": ids, "labels": labels}


def right(model, batch, chunk=5):
    h = model.hidden(batch["ids"])[:, :-1].flatten(0, 1)
    return _FusedLinearCE.apply(h, model.head.weight, batch["labels"][:, 1:].flatten(), chunk)


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    (3 * right(m, b, **VALUES)).backward()
    got = [p.grad.clone() for p in m.parameters()]; m.zero_grad()
    ref = F.cross_entropy(m.head(m.hidden(b["ids"]))[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100)
    (3 * ref).backward()
    print("loss", right(m, b).item(), "reference", ref.item(), "max gradient difference", max(float((a - p.grad).abs().max()) for a, p in zip(got, m.parameters())))
