"""Packed row whose padding tail is one more document with positions from 0. Done by several packers for variable-length attention kernels: cu_seqlens are derived from position_ids == 0, so the tail must start with 0 in order not to lengthen the last document.
cu_seqlens then has one more segment than there are documents, and its last entry is the padded width, not the number of real tokens."""
import torch
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of row dicts with input_ids (list of token ids)"}
SETTINGS = {"multiple": "the width is rounded up to a multiple of 8"}
NOTES = "Returns input_ids, labels, position_ids [1, width] and cu_seqlens [segments + 1]. Labels unshifted: -100 on each document's first token and on the tail. Pad id 0. If the documents fill the width exactly there is no tail segment. Any number of rows."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"input_ids": torch.randint(1, 50, (n,), generator=g).tolist()} for n in (5, 3, 6)]}


def right(rows, multiple=8):
    ids, labels, pos = [], [], []
    for r in rows:
        x = r["input_ids"]
        ids += x
        labels += [-100] + x[1:]
        pos += range(len(x))
    tail = -len(ids) % multiple
    ids += [0] * tail
    labels += [-100] * tail
    pos += range(tail)
    pos = torch.tensor([pos])
    cu = torch.cat([(pos[0] == 0).nonzero()[:, 0], torch.tensor([pos.shape[1]])]).int()
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": pos, "cu_seqlens": cu}


if __name__ == "__main__":
    b = right(make(0)["rows"])
    print(b["cu_seqlens"].tolist(), b["position_ids"].tolist())
    assert b["cu_seqlens"].tolist() == [0, 5, 8, 14, 16]
    assert (b["labels"] != -100).sum() == 14 - 3
    e = right([{"input_ids": [1] * 8}])
    assert e["cu_seqlens"].tolist() == [0, 8]
