"""Dropout seeds under tensor parallelism (Megatron-LM). Ranks of one tensor-parallel group SHARE the seed of replicated regions, else their copies of the residual stream would drift apart; only the
data-parallel index and the step enter. Equal seeds on neighbouring ranks are thus right, not a forgotten rank."""
FAMILY = "seeds"
KIND = "seeds"
INPUTS = {"rank": "global rank, tensor-parallel index runs fastest", "step": "global step"}
SETTINGS = {"base": "base seed, 1234", "tp": "size of a tensor-parallel group, 2"}
NOTES = ("Seed of dropout in replicated (not sharded) regions. Same for all ranks of a tensor-parallel group; different between data-parallel replicas and between steps. Needs no world size. "
         "sharded_seed() is the other stream, which does differ inside a group.")
import hashlib


def make(seed):
    return {"rank": seed % 8, "step": seed // 8}


def mix(*parts):
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def right(rank, step, base=1234, tp=2):
    return mix(base, "replicated", rank // tp, step)


def sharded_seed(rank, step, base=1234, tp=2):
    return mix(base, "sharded", rank // tp, rank % tp, step)


if __name__ == "__main__":
    seen = {}
    for step in range(200):
        for rank in range(8):
            seen.setdefault(right(rank, step), set()).add((rank // 2, step))
            assert right(rank, step) == right(rank ^ 1, step) and sharded_seed(rank, step) != sharded_seed(rank ^ 1, step)
    assert len(seen) == 4 * 200 and all(len(v) == 1 for v in seen.values())
    print("seeds of step 0:", [right(r, 0) for r in range(4)])
