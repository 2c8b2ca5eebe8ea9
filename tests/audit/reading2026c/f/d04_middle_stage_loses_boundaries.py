"""Middle pipeline stages do not get the packed boundaries. NVIDIA-NeMo/Megatron-Bridge#2952,
https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/2952, 2026. get_batch returned early on stages that are neither first nor last, so
cu_seqlens was None there and those layers attended over the whole pack. First and last layers were right, loss fell, benchmarks lost 10-20 points."""
import torch

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of several documents packed in each row, [rows, time]",
          "segments": "document number of each token, 0, 1, 2 ..., [rows, time]",
          "positions": "position inside its document, [rows, time]",
          "labels": "next token inside the same document, -100 on the last token of a document, [rows, time]"}
SETTINGS = {}
NOTES = ("Next-token cross entropy, mean over all labelled tokens of all rows. The model is three blocks, one per pipeline stage; the loss runs "
         "them in order. Every parameter is used. A document must not see another document of the pack.")

class Block(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, segments):
        time = x.shape[1]
        see = torch.ones(time, time).tril().bool().expand(x.shape[0], time, time)
        if segments is not None:
            see = see & (segments[:, :, None] == segments[:, None, :])
        scores = (self.q(x) @ self.k(x).transpose(1, 2) / 4).masked_fill(~see, float("-inf"))
        return x + self.o(scores.softmax(-1) @ self.v(x))

class Staged(torch.nn.Module):
    def __init__(self, vocab=32, width=16, longest=16, stages=3):
        super().__init__()
        self.emb, self.pos = torch.nn.Embedding(vocab, width), torch.nn.Embedding(longest, width)
        self.stages = torch.nn.ModuleList(Block(width) for _ in range(stages))
        self.head = torch.nn.Linear(width, vocab)

def make(seed):
    torch.manual_seed(seed)
    rows, time = 2, 16
    ids = torch.randint(0, 32, (rows, time))
    segments, positions, labels = torch.zeros_like(ids), torch.zeros_like(ids), torch.full_like(ids, -100)
    for r, lengths in enumerate(([5, 7, 4], [9, 4, 3])):
        at = 0
        for n, length in enumerate(lengths):
            segments[r, at:at + length] = n
            positions[r, at:at + length] = torch.arange(length)
            labels[r, at:at + length - 1] = ids[r, at + 1:at + length]
            at += length
    return {"model": Staged(), "ids": ids, "segments": segments, "positions": positions, "labels": labels}

def split(made):
    return made["model"], {k: v for k, v in made.items() if k != "model"}
def run(model, batch, metadata):
    x = model.emb(batch["ids"]) + model.pos(batch["positions"])
    for n, stage in enumerate(model.stages):
        x = stage(x, metadata(n))
    return torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

def broken(model, batch):
    last = len(model.stages) - 1
    def metadata(stage):
        if stage != 0 and stage != last:
            return None  # middle stages need neither tokens nor labels
        return batch["segments"]
    return run(model, batch, metadata)

def right(model, batch):
    return run(model, batch, lambda stage: batch["segments"])

def grads(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
if __name__ == "__main__":
    model, batch = split(make(0))
    a, b = broken(model, batch), right(model, batch)
    print("loss", a.item(), b.item(), "gradient difference", float((grads(a, model) - grads(b, model)).norm()))
    assert abs(float(a - b)) > 1e-5
    total, n = 0.0, 0
    for r in range(batch["ids"].shape[0]):  # each document alone
        for s in batch["segments"][r].unique():
            pick = batch["segments"][r] == s
            one = {k: v[r][pick][None] for k, v in batch.items()}
            count = int((one["labels"] >= 0).sum())
            total, n = total + float(run(model, one, lambda _: None)) * count, n + count
    print("documents alone", total / n)
    assert abs(total / n - float(b)) < 1e-5
