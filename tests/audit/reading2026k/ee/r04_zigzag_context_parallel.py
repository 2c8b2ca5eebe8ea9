"""Zig-zag shards for context parallelism. Megatron-LM get_batch_on_this_cp_rank, ring-flash-attention zigzag, torchtitan load-balanced CP.
A row is cut in 2 * cp chunks, and rank r gets chunk r and chunk 2 * cp - 1 - r, so that causal attention is balanced. Neighbouring tokens of a shard are then not neighbours of the row, positions jump,
and the labels must be shifted before the cut: labels[i] is the next token of the row, not the next token of the shard."""
import torch

FAMILY = "sharding and reductions over ranks"
KIND = "collator"
INPUTS = {"rows": "list of dicts with ids (list of token ids, none is 0) and loss_mask (list, 1 where the token is trained as a target)"}
SETTINGS = {"cp": "context-parallel ranks, 2", "pad": "pad token id, 0"}
NOTES = ("out: input_ids, labels, position_ids, each [cp, rows, length / cp]; the first dimension is the rank, in each rank the low chunk comes first. Rows are padded on the right to the longest row, rounded up to a multiple of 2 * cp. "
         "labels are already shifted: the label of a position is the next token of the row where that token has loss_mask 1, else -100; pads are -100. position_ids are positions in the row (pads count on).")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n in (11, 7, 14):
        rows.append({"ids": torch.randint(1, 40, (n,), generator=g).tolist(), "loss_mask": [0] * (n // 3) + [1] * (n - n // 3)})
    return {"rows": rows}


def right(rows, cp=2, pad=0):
    length = max(len(r["ids"]) for r in rows)
    length += -length % (2 * cp)
    ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), -100)
    for i, r in enumerate(rows):
        n = len(r["ids"])
        ids[i, :n] = torch.tensor(r["ids"])
        target = torch.where(torch.tensor(r["loss_mask"]) == 1, torch.tensor(r["ids"]), -100)
        labels[i, :n - 1] = target[1:]
    position = torch.arange(length).expand(len(rows), -1)

    def shard(x):
        chunks = x.chunk(2 * cp, dim=1)
        return torch.stack([torch.cat([chunks[r], chunks[2 * cp - 1 - r]], 1) for r in range(cp)])

    return {"input_ids": shard(ids), "labels": shard(labels), "position_ids": shard(position)}


if __name__ == "__main__":
    case = make(0)
    out = right(**case)
    print({k: tuple(v.shape) for k, v in out.items()}, out["position_ids"][:, 0].tolist())
    seen = 0
    for r in range(2):
        for i, row in enumerate(case["rows"]):
            for k, at in enumerate(out["position_ids"][r, i].tolist()):
                n = len(row["ids"])
                assert out["input_ids"][r, i, k] == (row["ids"][at] if at < n else 0)
                want = row["ids"][at + 1] if at + 1 < n and row["loss_mask"][at + 1] else -100
                assert out["labels"][r, i, k] == want
                seen += want != -100
    assert seen == sum(sum(r["loss_mask"][1:]) for r in case["rows"])
    print("trained targets", seen)
