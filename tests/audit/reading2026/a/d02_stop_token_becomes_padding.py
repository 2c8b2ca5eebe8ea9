"""The sampled end-of-turn token is dropped and comes back as padding. karpathy/nanochat#810,
https://github.com/karpathy/nanochat/issues/810, 2026. The generator marks a row complete on <|assistant_end|> without
appending the token or its mask; the batch builder pads short rows with that same id and mask 0. So the decision to
stop, which the model did sample, never gets a target in RL."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "agents"
KIND = "collator"
INPUTS = {"rows": "list of rollouts: 'prompt' (ids), 'stream' (ids as they came out of the engine, the terminal token "
                  "last if the model stopped), 'stream_mask' (1 if the model sampled the token, 0 if a tool forced it)"}
SETTINGS = {"end_id": "id of <|assistant_end|>, 1; also used to pad"}
NOTES = ("Returns inputs and targets (shifted by one, -1 where not trained). Every token that the model sampled is a "
         "target, tool output and prompt are not; padding is not. A row cut at the token limit has no end token.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n, stopped in ((6, True), (10, False), (8, True), (4, True)):
        stream = torch.randint(5, 40, (n,), generator=g).tolist()
        mask = [1] * n
        if n >= 8:
            mask[3:5] = [0, 0]                        # output of the calculator
        if stopped:
            stream, mask = stream + [1], mask + [1]
        rows.append({"prompt": torch.randint(5, 40, (3,), generator=g).tolist(), "stream": stream, "stream_mask": mask})
    return {"rows": rows}

def _pad(seqs, masks, end_id):
    width = max(len(s) for s in seqs)
    ids = torch.tensor([s + [end_id] * (width - len(s)) for s in seqs])
    mask = torch.tensor([m + [0] * (width - len(m)) for m in masks])
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[mask[:, 1:] == 0] = -1
    return {"inputs": inputs, "targets": targets}

def broken(rows, end_id=1):
    seqs, masks = [], []
    for row in rows:
        seq, mask, completed = list(row["prompt"]), [0] * len(row["prompt"]), False
        for token, m in zip(row["stream"], row["stream_mask"]):
            if not completed:
                if token == end_id:
                    completed = True
                else:
                    seq.append(token)
                    mask.append(m)
        seqs.append(seq)
        masks.append(mask)
    return _pad(seqs, masks, end_id)

def right(rows, end_id=1):
    seqs, masks = [], []
    for row in rows:
        seq, mask, completed = list(row["prompt"]), [0] * len(row["prompt"]), False
        for token, m in zip(row["stream"], row["stream_mask"]):
            if not completed:
                completed = token == end_id
                seq.append(token)
                mask.append(m)
        seqs.append(seq)
        masks.append(mask)
    return _pad(seqs, masks, end_id)

if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    nb, nr = int((b["targets"] == 1).sum()), int((r["targets"] == 1).sum())
    print("end tokens that are targets:", nb, nr, "trained tokens:", int((b["targets"] >= 0).sum()), int((r["targets"] >= 0).sum()))
    assert nb == 0 and nr == 3
