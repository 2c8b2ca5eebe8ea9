"""Seeds on a data x tensor grid (Megatron-LM). The ranks of one tensor-parallel group share the DATA seed (they hold pieces of one sample: equal seeds are required), while their dropout seed
differs by 2718 + tensor rank. Equal seeds on different ranks look like the classic bug, and are not."""
FAMILY = "seeds"
KIND = "seeds"
INPUTS = {"rank": "global rank, 0 .. world-1; tensor rank is the fastest index", "step": "step, from 0"}
SETTINGS = {"base": "run seed, 1234", "tp": "size of a tensor-parallel group, 2 (divides the world size)"}
NOTES = "Returns (data seed, dropout seed). The data seed is a function of (data rank, step) only and equal within a tensor group by design; the dropout seed is different on every rank and step. Mixed with SHA-256, not Python's salted hash. World size must be a multiple of tp."
import hashlib


def mix(*parts):
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:7], "big")


def make(seed):
    return {"rank": seed % 8, "step": seed}


def right(rank, step, base=1234, tp=2):
    dp_rank, tp_rank = divmod(rank, tp)
    return mix("data", base, dp_rank, step), mix("dropout", base + 2718 + tp_rank, dp_rank, step)


if __name__ == "__main__":
    data, drop = {}, set()
    for rank in range(8):
        for step in range(50):
            a, b = right(rank, step)
            data.setdefault(a, set()).add((rank // 2, step)); drop.add(b)
    assert len(data) == 4 * 50 and all(len(v) == 1 for v in data.values()) and len(drop) == 8 * 50
    assert right(2, 7)[0] == right(3, 7)[0] != right(4, 7)[0]
    print("ok", right(0, 0))
