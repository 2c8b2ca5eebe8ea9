"""Context-parallel shards of a packed row from `cu_seqlens // cp_size`.
ISEEKYAN/Megatron-LM#111, https://github.com/ISEEKYAN/Megatron-LM/pull/111, 2026.
The sequence-sharded path took the local boundaries as `cu_seqlens // cp_size` (integer truncation, documents not padded
to a multiple of cp_size, no guard) and sliced every document with them. With documents of variable length the shards
hold tokens of the neighbouring document and lose others; a single dense sequence, as in the parity test, was right."""
import random

FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "the documents of one packed row, each {'input_ids': list of ints, all > 0}"}
SETTINGS = {"cp_size": "number of context-parallel ranks, 2"}
NOTES = ("Returns one row per context-parallel rank (exactly cp_size rows): 'input_ids', 'position_ids' (position in the "
         "document), 'loss_mask' (1 for a real token, 0 for padding) and 'cu_seqlens' (local boundaries). Every document "
         "is padded at its end with token 0 to a multiple of cp_size and cut in cp_size contiguous parts; rank r holds "
         "part r of every document, in the order of the documents. Over all ranks each real token occurs exactly once.")


def make(seed):
    rng = random.Random(seed)
    rows = []
    for n in (rng.choice((3, 5, 7)), rng.randrange(3, 9), rng.choice((5, 7)), rng.randrange(4, 9)):
        rows.append({"input_ids": [rng.randrange(1, 1000) for _ in range(n)]})
    return {"rows": rows}


def _shards(tokens, mask, cu, local_cu, cp_size):
    out = []
    for rank in range(cp_size):
        one = {"input_ids": [], "position_ids": [], "loss_mask": [], "cu_seqlens": list(local_cu)}
        for i in range(len(cu) - 1):
            size = local_cu[i + 1] - local_cu[i]
            first = rank * size
            one["input_ids"] += tokens[cu[i] + first:cu[i] + first + size]
            one["loss_mask"] += mask[cu[i] + first:cu[i] + first + size]
            one["position_ids"] += range(first, first + size)
        out.append(one)
    return out


def broken(rows, cp_size=2):
    tokens, mask, cu = [], [], [0]
    for row in rows:
        tokens += row["input_ids"]
        mask += [1] * len(row["input_ids"])
        cu.append(len(tokens))
    pad = -len(tokens) % cp_size
    tokens, mask, cu[-1] = tokens + [0] * pad, mask + [0] * pad, cu[-1] + pad
    return _shards(tokens, mask, cu, [c // cp_size for c in cu], cp_size)


def right(rows, cp_size=2):
    tokens, mask, cu = [], [], [0]
    for row in rows:
        pad = -len(row["input_ids"]) % cp_size
        tokens += row["input_ids"] + [0] * pad
        mask += [1] * len(row["input_ids"]) + [0] * pad
        cu.append(len(tokens))
    return _shards(tokens, mask, cu, [c // cp_size for c in cu], cp_size)


if __name__ == "__main__":
    rows = make(0)["rows"]
    want = sorted(t for r in rows for t in r["input_ids"])
    for name, fn in (("broken", broken), ("right", right)):
        got = sorted(t for r in fn(rows) for t, m in zip(r["input_ids"], r["loss_mask"]) if m)
        print(name, "every token once:", got == want, [r["cu_seqlens"] for r in fn(rows)])
    assert sorted(t for r in right(rows) for t, m in zip(r["input_ids"], r["loss_mask"]) if m) == want
    assert broken(rows) != right(rows)
