"""Two seeds per rank in tensor parallelism: the 'default' seed is EQUAL on all ranks of a tensor group (dropout on replicated activations must agree) and the 'sharded' one differs by tensor rank with offset 2718 (dropout on sharded activations must differ). Equal seeds on different ranks are right (Megatron-LM model_parallel_cuda_manual_seed)."""
FAMILY = "sharding"
KIND = "seeds"
INPUTS = {"rank": "global rank; tensor ranks are neighbours", "step": "optimizer step"}
SETTINGS = {"base": "1234", "tp": "size of the tensor group, 2; must divide the world size", "stride": "1000003 per step, above any rank offset"}
NOTES = "Returns (replicated seed, sharded seed). Ranks rank // tp are data-parallel replicas and differ in both. Pure function, so it resumes."


def make(seed):
    return {"rank": seed % 8, "step": seed // 8}


def right(rank, step, base=1234, tp=2, stride=1000003):
    data_rank, tensor_rank = divmod(rank, tp)
    replicated = base + stride * step + 10007 * data_rank
    return replicated, replicated + 2718 + tensor_rank


if __name__ == "__main__":
    for step in range(5):
        s = [right(r, step) for r in range(8)]
        assert all(s[r][0] == s[r + 1][0] for r in range(0, 8, 2))
        assert len({a for a, _ in s}) == 4 and len({b for _, b in s}) == 8
    every = [x for st in range(50) for r in range(8) for x in set(right(r, st))]
    assert len(set(every)) == 50 * (4 + 8)
    print("ok", [right(r, 0) for r in range(4)])
