"""Zigzag (load-balanced) context-parallel sharding of a batch (Megatron-LM get_batch_on_this_cp_rank, ring-flash-attention zigzag): rank r holds the chunks r and
2n-1-r, so that its tokens are not contiguous and its position ids jump."""
FAMILY = "packing and positions"
KIND = "collator"
INPUTS = {"rows": "list of {'ids': token ids, 'loss_mask': 1 where the token is trained (as a target)}"}
SETTINGS = {"cp_size": "context-parallel ranks, 2", "pad_id": "0"}
NOTES = """(rows) -> {input_ids, labels, position_ids, attention_mask}, each [cp_size, rows, local length]; slice [r] goes to context-parallel rank r. Rows are padded on the right
with pad_id to a multiple of 2 * cp_size. labels are shifted on the whole row, before it is split: labels[t] = ids[t+1] if token t+1 is trained, else
-100 (also at the last position and in front of padding); no further shift may be done on a shard. The row is split into 2 * cp_size equal
chunks and rank r gets chunk r followed by chunk 2 * cp_size - 1 - r (this balances the causal attention), so the local order is not contiguous: position_ids carry
the global position of every token (0 ... padded length - 1) and jump in the middle of the shard. attention_mask is 1 on row tokens. Every token
is on exactly one rank; the loss is the sum over all ranks divided by the number of labels != -100 over all ranks."""
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(3):
        n = int(torch.randint(5, 14, (1,), generator=g))
        rows.append({"ids": torch.randint(1, 40, (n,), generator=g).tolist(), "loss_mask": [0, 0] + torch.randint(0, 2, (n - 2,), generator=g).tolist()})
    return {"rows": rows}


def right(rows, cp_size=2, pad_id=0):
    m = 2 * cp_size
    n = -(-max(len(r["ids"]) for r in rows) // m) * m
    full = {"input_ids": [], "labels": [], "position_ids": [], "attention_mask": []}
    for r in rows:
        ids, k = r["ids"], len(r["ids"])
        full["input_ids"].append(ids + [pad_id] * (n - k))
        full["labels"].append([ids[t + 1] if t + 1 < k and r["loss_mask"][t + 1] else -100 for t in range(n)])
        full["position_ids"].append(list(range(n)))
        full["attention_mask"].append([1] * k + [0] * (n - k))
    out = {}
    for name, v in full.items():
        chunks = torch.tensor(v).chunk(m, dim=1)
        out[name] = torch.stack([torch.cat([chunks[r], chunks[m - 1 - r]], 1) for r in range(cp_size)])
    return out


if __name__ == "__main__":
    x = make(0)
    for cp in (1, 2, 3):
        o = right(x["rows"], cp_size=cp)
        for b, r in enumerate(x["rows"]):
            at = {}
            for k in range(cp):
                for i, l, p, a in zip(*(o[n][k, b].tolist() for n in ("input_ids", "labels", "position_ids", "attention_mask"))):
                    assert p not in at
                    at[p] = (i, l, a)
            for p in sorted(at):
                i, l, a = at[p]
                assert a == int(p < len(r["ids"])) and i == (r["ids"][p] if a else 0)
                assert l == (r["ids"][p + 1] if p + 1 < len(r["ids"]) and r["loss_mask"][p + 1] else -100)
    print(right(**x)["position_ids"][:, 0].tolist())
