"""Mixing streams after the split by rank makes all ranks read the same data. ByteDance-Seed/VeOmni#358,
https://github.com/ByteDance-Seed/VeOmni/pull/358 (upstream huggingface/datasets#7868), 2026. Each source was split with
split_dataset_by_node, which only notes (rank, world) on the dataset; interleave_datasets builds a new stream from the
raw iterables and loses that note. Every rank yields the same samples in the same order. The fix mixes first and splits
the mixture."""
FAMILY = "sharding"
KIND = "seeds"
INPUTS = {"rank": "data-parallel rank", "step": "index of the sample on this rank",
          "sources": "list of sources, each a list of sample ids"}
SETTINGS = {"world": "ranks, 4", "probabilities": "mixing weights, (0.5, 0.5)", "seed": "mixing seed, 42, same on all ranks"}
NOTES = ("Returns the sample id that the rank trains on at that step. Over the ranks the samples of a pass are disjoint "
         "and together follow the mixture. Sources are cycled.")
import random


def make(seed):
    return {"rank": 1, "step": 3, "sources": [[f"a{seed}-{i}" for i in range(64)], [f"b{seed}-{i}" for i in range(64)]]}


class Stream:
    """A lazily iterated source; the split is a note that __iter__ applies."""

    def __init__(self, raw, node=None):
        self.raw, self.node = raw, node

    def __iter__(self):
        for i, x in enumerate(self.raw()):
            if self.node is None or i % self.node[1] == self.node[0]:
                yield x


def split_by_node(stream, rank, world):
    return Stream(stream.raw, (rank, world))


def interleave(streams, probabilities, seed):
    def raw():
        rng = random.Random(seed)
        its = [iter(s.raw()) for s in streams]
        while True:
            yield next(rng.choices(its, probabilities)[0])
    return Stream(raw)


def _cycle(items):
    def raw():
        while True:
            yield from items
    return Stream(raw)


def _nth(stream, n):
    for i, x in enumerate(stream):
        if i == n:
            return x


def broken(rank, step, sources, world=4, probabilities=(0.5, 0.5), seed=42):
    split = [split_by_node(_cycle(s), rank, world) for s in sources]
    return _nth(interleave(split, probabilities, seed), step)


def right(rank, step, sources, world=4, probabilities=(0.5, 0.5), seed=42):
    mixed = interleave([_cycle(s) for s in sources], probabilities, seed)
    return _nth(split_by_node(mixed, rank, world), step)


if __name__ == "__main__":
    data = make(0)
    for name, fn in (("broken", broken), ("right", right)):
        seen = [[fn(r, s, data["sources"]) for s in range(4)] for r in range(4)]
        print(name, "distinct samples of 16:", len({x for row in seen for x in row}), seen[0], seen[1])
    assert broken(**data) != right(**data)
