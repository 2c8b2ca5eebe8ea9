"""A data stream whose whole state is ONE integer. The order of epoch e is drawn from (seed, e) when first needed and cached; load_state_dict does not store the permutation but throws the cache
away, so the next call fills it lazily. The state after loading looks empty, and gives the same samples."""
FAMILY = "state"
KIND = "state"
INPUTS = {"size": "number of samples", "seed": "seed of the run", "consumed": "samples to draw before saving"}
SETTINGS = {"batch": "samples per call, 4"}
NOTES = "right(size, seed, consumed) makes a stream, advances, saves, loads into a fresh stream and returns both. Batches may straddle two epochs (nothing is dropped); each epoch visits each sample once. The number of samples per call may change between save and load."
import torch


class Stream:
    def __init__(self, size, seed, batch=4):
        self.size, self.seed, self.batch, self.consumed, self._order = size, seed, batch, 0, None

    def _at(self, k):
        epoch, i = divmod(k, self.size)
        if self._order is None or self._order[0] != epoch:
            g = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(self.size, generator=g).tolist())
        return self._order[1][i]

    def next(self):
        out = [self._at(self.consumed + j) for j in range(self.batch)]
        self.consumed += self.batch
        return out

    def state_dict(self):
        return {"consumed": self.consumed, "seed": self.seed, "size": self.size}

    def load_state_dict(self, state):
        if state["size"] != self.size:
            raise ValueError("the data set has changed")
        self.consumed, self.seed, self._order = state["consumed"], state["seed"], None


def make(seed):
    return {"size": 11, "seed": seed, "consumed": 4 * (seed % 7)}


def right(size, seed, consumed, batch=4):
    a = Stream(size, seed, batch)
    while a.consumed < consumed:
        a.next()
    b = Stream(size, seed=999, batch=batch)
    b.load_state_dict(a.state_dict())
    return a, b


if __name__ == "__main__":
    for s in range(14):
        a, b = right(**make(s))
        assert [a.next() for _ in range(9)] == [b.next() for _ in range(9)]
    c = Stream(11, 5); seen = [i for _ in range(11) for i in c.next()]
    assert all(sorted(seen[e * 11:(e + 1) * 11]) == list(range(11)) for e in range(4)) and seen[:11] != seen[11:22]
    print("ok", seen[:12])
