"""num_tokens counts each token once per tensor-parallel rank. huggingface/trl#7100,
https://github.com/huggingface/trl/issues/7100, 2026. Under tensor parallelism the ranks of a group hold the same batch, but
the count was gathered and summed over all processes. With tp_size 2 the logged number of trained tokens is twice the
truth, and so is everything derived from it (tokens per second)."""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list with one dict per process: 'attention_mask' [rows, time]; processes 2i and 2i+1 form a "
                      "tensor-parallel group and hold the same batch"}
SETTINGS = {"tp_size": "size of a tensor-parallel group, 2"}
NOTES = "Number of real tokens in the step, each token of the global batch counted once."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for group in range(3):
        lengths = torch.randint(3, 16, (4,), generator=g)
        mask = (torch.arange(16)[None] < lengths[:, None]).long()
        out += [{"attention_mask": mask}, {"attention_mask": mask.clone()}]
    return {"per_rank": out}

def broken(per_rank, tp_size=2):
    return int(torch.stack([r["attention_mask"].sum() for r in per_rank]).sum())

def right(per_rank, tp_size=2):
    return int(torch.stack([r["attention_mask"].sum() for r in per_rank]).sum()) // tp_size

def single(per_rank, tp_size=2):
    return int(torch.cat([r["attention_mask"] for r in per_rank[::tp_size]]).sum())

if __name__ == "__main__":
    d = make(0)
    print(broken(**d), right(**d), "one process:", single(**d))
    assert right(**d) == single(**d) and broken(**d) == 2 * single(**d)
