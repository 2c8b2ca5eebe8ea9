"""Batches for a model with memory (Transformer-XL, LSTM language models): the token stream is cut into B long lanes, and the rows are emitted so that row b of a batch continues row b of the batch before.
So rows next to each other are NOT neighbours in the text, nothing may be shuffled, windows cross documents, and the memory is never reset inside an epoch."""
FAMILY = "data stages and collators"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: 'ids' (token ids of a document, in the order of the corpus)"}
SETTINGS = {"lanes": "batch size, 3", "time": "window, 5"}
NOTES = ("Output rows: 'ids', 'targets' (the next tokens, already shifted: do not shift again), 'lane', 'window'. The row number modulo lanes is the lane, so the loader must use batch size 3, no shuffle, no drop. Fewer than `lanes` tokens at the end of the stream are dropped; "
         "the last window may be shorter, all its rows equally. The first token of a lane is never a target. EOS id 0 is put after each document. Output length differs from the input length. ValueError if a lane would have fewer than two tokens.")
import random
import torch
from torch import nn
import torch.nn.functional as F


def right(rows, lanes=3, time=5):
    stream = [t for row in rows for t in list(row["ids"]) + [0]]
    n = len(stream) // lanes
    if n < 2:
        raise ValueError("stream too short")
    out = []
    for w, a in enumerate(range(0, n - 1, time)):
        k = min(time, n - 1 - a)
        for b in range(lanes):
            s = b * n + a
            out.append({"ids": stream[s:s + k], "targets": stream[s + 1:s + k + 1], "lane": b, "window": w})
    return out


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randint(1, 29) for _ in range(r.randint(1, 12))]} for _ in range(9)]}


if __name__ == "__main__":
    for seed in range(10):
        rows = make(seed)["rows"]
        out = right(rows)
        stream = [t for row in rows for t in row["ids"] + [0]]
        n = len(stream) // 3
        torch.manual_seed(seed)
        emb, rnn, head = nn.Embedding(30, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 30)
        memory, total, count = None, 0.0, 0
        for i in range(0, len(out), 3):
            group = out[i:i + 3]
            assert [r["lane"] for r in group] == [0, 1, 2]
            x, y = (torch.tensor([r[k] for r in group]) for k in ("ids", "targets"))
            h, memory = rnn(emb(x), memory)
            total = total + F.cross_entropy(head(h).flatten(0, 1), y.flatten(), reduction="sum")
            count += y.numel()
            memory = memory.detach()
        lanes = torch.tensor(stream[:3 * n]).view(3, n)             # slow twin: whole lanes in one go
        whole = F.cross_entropy(head(rnn(emb(lanes[:, :-1]))[0]).flatten(0, 1), lanes[:, 1:].flatten(), reduction="sum")
        assert torch.allclose(total, whole, rtol=1e-5) and count == 3 * (n - 1)
        (total / count).backward()
        assert rnn.weight_hh_l0.grad.abs().sum() > 0
        for b in range(3):
            assert sum((r["ids"] for r in out if r["lane"] == b), []) == stream[b * n:b * n + n - 1]
    print("ok", (total / count).item(), count)
