"""Mixing without replacement repeats a row when a source is empty. huggingface/datasets#8626,
https://github.com/huggingface/datasets/issues/8626, 2026. interleave_datasets with probabilities and the strategy
all_exhausted_without_replacement starts with no source marked as exhausted; when an empty source (all rows filtered
away) is drawn, its offset is appended before the length check, and that offset points at the first row of the next
source. Each row should occur exactly once; the fix marks empty sources as exhausted from the start."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with source (0 .. sources - 1) and id; one source can have no rows after filtering"}
SETTINGS = {"sources": "number of sources to mix, 3", "probabilities": "drawing weights, (1/3, 1/3, 1/3)", "seed": "42"}
NOTES = "Returns a mixture which holds every input row exactly once; sources are drawn by weight until all are exhausted."
import random


def make(seed):
    rng = random.Random(seed)
    counts = [0, rng.randrange(4, 7), rng.randrange(2, 5)]        # source 0 was filtered away
    return {"rows": [{"source": s, "id": f"{s}-{i}"} for s, n in enumerate(counts) for i in range(n)]}


def _mix(rows, sources, probabilities, seed, empty_is_exhausted):
    lengths = [sum(r["source"] == s for r in rows) for s in range(sources)]
    table = [r for s in range(sources) for r in rows if r["source"] == s]       # the concatenated dataset
    offsets = [sum(lengths[:s]) for s in range(sources)]
    exhausted = [empty_is_exhausted and n == 0 for n in lengths]
    current, indices = [0] * sources, []
    rng = random.Random(seed)
    while not all(exhausted):
        s = rng.choices(range(sources), probabilities)[0]
        if exhausted[s]:
            continue
        indices.append(offsets[s] + current[s])
        current[s] += 1
        if current[s] >= lengths[s]:
            exhausted[s] = True
    return [table[i] for i in indices]


def broken(rows, sources=3, probabilities=(1 / 3, 1 / 3, 1 / 3), seed=42):
    return _mix(rows, sources, probabilities, seed, False)


def right(rows, sources=3, probabilities=(1 / 3, 1 / 3, 1 / 3), seed=42):
    return _mix(rows, sources, probabilities, seed, True)


if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("broken", sorted(x["id"] for x in b))
    print("right ", sorted(x["id"] for x in r))
    assert len(b) != len(r) == len(make(0)["rows"])
