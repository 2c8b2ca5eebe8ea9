"""Recurrent and convolution state runs on across packed samples. EvolvingLMMs-Lab/lmms-engine#167,
https://github.com/EvolvingLMMs-Lab/lmms-engine/pull/167, 2026. With padding removed, the hybrid model sees one row with
all samples. The gated linear attention layer got no boundaries: its recurrent state accumulates over the whole pack and
the short causal convolution reads the last tokens of the sample before. Nothing fails; each sample but the first is
trained in a foreign context. The fix passes cu_seqlens / seq_idx to both kernels."""
FAMILY = "packing"
KIND = "loss"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"ids": "token ids of several samples in one row, [1, time]",
          "seq_idx": "index of the sample of each token, [1, time], not decreasing",
          "loss_mask": "1 where the token is a trained target, [1, time]; 0 on the first token of each sample"}
SETTINGS = {}
NOTES = ("Next-token cross entropy, mean over trained tokens of the pack. Samples are independent: the loss must equal "
         "the one of the samples run one by one. All parameters are used.")


class HybridLM(nn.Module):
    def __init__(self, vocab=31, width=12, kernel=4):
        super().__init__()
        self.kernel = kernel
        self.tok = nn.Embedding(vocab, width)
        self.conv = nn.Parameter(torch.randn(kernel, width) * 0.5)
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, seq_idx=None):
        if seq_idx is None:
            seq_idx = torch.zeros_like(ids)
        x = self.tok(ids)
        mixed = torch.zeros_like(x)
        for back in range(self.kernel):
            shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
            same = F.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[1]] == seq_idx
            mixed = mixed + shifted * self.conv[back] * same[..., None]
        mixed = F.silu(mixed)
        keep, add = torch.sigmoid(self.gate(mixed) + 2), self.value(mixed)
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            if t:
                state = state * (seq_idx[:, t] == seq_idx[:, t - 1]).float()[:, None]
            state = keep[:, t] * state + add[:, t]
            out.append(torch.tanh(state) + x[:, t])
        return self.head(torch.stack(out, 1))


def make(seed):
    torch.manual_seed(seed)
    lengths = [7, 5, 9]
    ids = torch.randint(0, 31, (1, sum(lengths)))
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    loss_mask = torch.ones_like(ids)
    loss_mask[:, 1:][seq_idx[:, 1:] != seq_idx[:, :-1]] = 0
    loss_mask[:, 0] = 0
    return {"model": HybridLM(), "ids": ids, "seq_idx": seq_idx, "loss_mask": loss_mask}


def _loss(logits, batch):
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    mask = batch["loss_mask"][:, 1:].flatten().float()
    return (nll * mask).sum() / mask.sum()


def broken(model, batch):
    return _loss(model(batch["ids"]), batch)


def right(model, batch):
    return _loss(model(batch["ids"], batch["seq_idx"]), batch)


if __name__ == "__main__":
    values, grads = {}, {}
    for name, fn in (("broken", broken), ("right", right)):
        data = make(0)
        model = data.pop("model")
        loss = fn(model, data)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        values[name] = loss.item()
        grads[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    print("loss", values)
    gap = (grads["broken"] - grads["right"]).norm() / grads["right"].norm()
    print("relative gradient gap", gap.item())
    assert gap > 1e-3
    data = make(0)
    model = data.pop("model")
    cuts = [0, 7, 12, 21]
    nll = [F.cross_entropy(model(data["ids"][:, a:b])[0, :-1], data["ids"][0, a + 1:b], reduction="sum")
           for a, b in zip(cuts, cuts[1:])]
    print("samples one by one", (sum(nll) / (21 - 3)).item())
