"""Seeds that many ranks share on purpose. Tensor-parallel ranks share the default seed (dropout outside the sharded regions must
be identical on replicated activations), differ in the second stream (sharded regions), pipeline stages are 100 apart, and data-parallel
ranks share everything (Megatron-LM _set_random_seed and model_parallel_cuda_manual_seed; 2718 is 'just for fun')."""
import torch

FAMILY = "sharding and reductions over ranks"
KIND = "seeds"
INPUTS = {"rank": "global rank, order tp fastest, then dp, then pp (Megatron order 'tp-dp-pp')",
          "step": "training step; not used: the seed is set once at the start, the streams advance by themselves"}
SETTINGS = {"tp": "tensor-parallel size, 2", "dp": "data-parallel size, 3", "pp": "pipeline size, 2", "seed": "base seed, 1234"}
NOTES = ("Returns {'default': seed, 'sharded': seed}: two generators per rank, set once. Deliberately equal: 'default' over tp and dp, "
         "'sharded' over dp. Data differ over dp ranks through the sampler, not through this seed, so equal dropout masks over dp ranks meet different data. "
         "Deliberately different: 'sharded' over tp; both over pp. The streams do not collide while tp <= 100 and 100*pp <= 2718. Needs rank < tp*dp*pp (12).")


def make(seed):
    return {"rank": seed % 12, "step": 5 * seed}


def right(rank, step, tp=2, dp=3, pp=2, seed=1234):
    assert 0 <= rank < tp * dp * pp
    tp_rank, pp_rank = rank % tp, rank // (tp * dp)
    base = seed + 100 * pp_rank
    return {"default": base, "sharded": base + 2718 + tp_rank}


def dropout(x, p, generator):
    keep = (torch.rand(x.shape, generator=generator) >= p).to(x.dtype)
    return x * keep / (1 - p)


if __name__ == "__main__":
    seeds = [right(r, 0) for r in range(12)]
    for r, s in enumerate(seeds):
        tp_rank, dp_rank, pp_rank = r % 2, r // 2 % 3, r // 6
        print(r, (tp_rank, dp_rank, pp_rank), s)
    for a in range(12):
        for b in range(12):
            ta, pa, tb, pb = a % 2, a // 6, b % 2, b // 6
            assert (seeds[a]["default"] == seeds[b]["default"]) == (pa == pb)
            assert (seeds[a]["sharded"] == seeds[b]["sharded"]) == (pa == pb and ta == tb)
    assert not {s["default"] for s in seeds} & {s["sharded"] for s in seeds}
    # why: row-parallel layer, y = sum over tp of x_r W_r, then dropout on the replicated y must agree on both tp ranks
    torch.manual_seed(0)
    x, w = torch.randn(4, 8), torch.randn(8, 6, requires_grad=True)
    y = x[:, :4] @ w[:4] + x[:, 4:] @ w[4:]
    out = [dropout(y, 0.5, torch.Generator().manual_seed(right(r, 0)["default"])) for r in (0, 1)]
    assert torch.equal(out[0], out[1])
    out[0].sum().backward()
    # and the sharded activations must not get the same mask on both ranks (it would repeat the pattern over the width)
    m = [dropout(torch.ones(4, 50), 0.5, torch.Generator().manual_seed(right(r, 0)["sharded"])) for r in (0, 1)]
    assert not torch.equal(m[0], m[1])
    print("replicated outputs equal, sharded masks differ, gradient", w.grad.abs().sum().item())
