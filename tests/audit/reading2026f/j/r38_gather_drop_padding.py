"""Evaluation over ranks when the distributed sampler repeated the first samples to make the ranks even: rank r has samples r, r+W, r+2W, ...; the gathered results are interleaved back and cut to the true length before the mean. Throwing away results is right (torch DistributedSampler; accelerate gather_for_metrics)."""
import torch

FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks of a tensor of 0/1 correctness, all the same length, strided sampling, padded by wrapping round", "total": "true number of samples"}
SETTINGS = {}
NOTES = "Accuracy over the true samples, each once. Needs strided ranks of equal length: ceil(total / ranks). Any number of ranks."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    total, ranks = 10 + seed % 5, 4
    correct = (torch.rand(total, generator=g) > 0.4).float()
    each = -(-total // ranks)
    order = torch.arange(each * ranks) % total
    return {"per_rank": [correct[order[r::ranks]] for r in range(ranks)], "total": total, "_all": correct}


def right(per_rank, total):
    flat = torch.stack(per_rank, dim=1).flatten()          # [each, ranks] -> sampler order
    return float(flat[:total].mean())


def single_process(correct):
    return float(correct.mean())


if __name__ == "__main__":
    differs = 0
    for s in range(20):
        d = make(s)
        a, b = right(d["per_rank"], d["total"]), single_process(d["_all"])
        assert abs(a - b) < 1e-7
        differs += abs(float(torch.cat(d["per_rank"]).mean()) - b) > 1e-6
    print("ok", a, b, "naive mean differs in", differs, "of 20")
