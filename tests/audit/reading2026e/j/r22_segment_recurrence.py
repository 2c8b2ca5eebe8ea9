"""Long rows in segments with a carried state: values come from the whole past, the gradient is cut at each segment border by detach (truncated back-propagation; Transformer-XL, Dai et al. 2019). The first token of a segment is a target, predicted by the last output of the segment before, so no token is lost at the borders."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "long-context"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained"}
SETTINGS = {"segment": "segment length, 5 (need not divide the row)"}
NOTES = "Value equals the unsegmented loss exactly; the gradient is truncated on purpose. Sum over segments divided by all trained tokens of all rows. All parameters used; any number of rows."


class TinyGRU(nn.Module):
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids, state=None):
        h, state = self.rnn(self.emb(ids), state)
        return self.head(h), state


def make(seed):
    torch.manual_seed(seed)
    m = torch.ones(3, 18)
    m[0, :4], m[1, 11:] = 0, 0
    return {"model": TinyGRU(), "ids": torch.randint(0, 31, (3, 18)), "loss_mask": m}


def right(model, batch, segment=5):
    inputs, targets, m = batch["ids"][:, :-1], batch["ids"][:, 1:], batch["loss_mask"][:, 1:]
    total, state = 0.0, None
    for a in range(0, inputs.shape[1], segment):
        cut = slice(a, a + segment)
        logits, state = model(inputs[:, cut], None if state is None else state.detach())
        ce = F.cross_entropy(logits.transpose(1, 2), targets[:, cut], reduction="none")
        total = total + (ce * m[:, cut]).sum()
    return total / m.sum()


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lg, _ = model(d["ids"][:, :-1])
    ce = F.cross_entropy(lg.transpose(1, 2), d["ids"][:, 1:], reduction="none")
    want = (ce * d["loss_mask"][:, 1:]).sum() / d["loss_mask"][:, 1:].sum()
    g, = torch.autograd.grad(want, model.rnn.weight_hh_l0)
    gap = float((g - model.rnn.weight_hh_l0.grad).abs().max())
    assert torch.allclose(loss, want.detach(), atol=1e-5) and not dead and gap > 0
    assert abs(float(right(model, d, segment=99).detach()) - float(loss)) < 1e-5
    print("ok", float(loss), float(want.detach()), "gradient differs by", gap)
