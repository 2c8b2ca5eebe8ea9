"""Two seed streams: ranks of one tensor-parallel group share the default stream (dropout on replicated activations must agree) and differ in the model-parallel stream (dropout on sharded ones must not), offset 2718 as in Megatron. Equal seeds on several ranks are therefore right."""
FAMILY = "seeds"; KIND = "seeds"
INPUTS = {"rank": "global rank, tensor-parallel fastest", "step": "optimizer step"}
SETTINGS = {"tp": "tensor-parallel size, 2", "base": "1234", "stream": "default or parallel, default"}
NOTES = "default: same within a tp group, different over data-parallel ranks and steps. parallel: different for every rank. The two streams never meet for fewer than 2718 ranks."
def make(seed): return {"rank": seed % 8, "step": seed}
def right(rank, step, tp=2, base=1234, stream="default"):
    dp, t = divmod(rank, tp)
    off = 2718 + dp * tp + t if stream == "parallel" else dp
    return base + off + step * 100_003
if __name__ == "__main__":
    for s in range(3):
        a = [right(r, s) for r in range(8)]; b = [right(r, s, stream="parallel") for r in range(8)]
        assert all(a[2 * i] == a[2 * i + 1] for i in range(4)) and len(set(a)) == 4 and len(set(b)) == 8 and not set(a) & set(b)
    assert len({right(r, s, stream=k) for r in range(0, 8, 2) for s in range(50) for k in ("default", "parallel")}) == 400; print(a, b)
