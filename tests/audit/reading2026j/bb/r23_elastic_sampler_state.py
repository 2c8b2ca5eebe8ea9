"""A shuffling sampler whose saved state has no random state and no permutation: only the seed, the length and the GLOBAL number of consumed samples. The order of an epoch is recomputed
from (seed, epoch); the same state is right for every rank and may be loaded with another number of ranks or another batch size (Megatron-LM consumed_samples,
MosaicML StreamingDataset's elastic determinism). A batch may straddle two epochs."""
import torch

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"length": "samples in the dataset", "seed": "shuffle seed", "world": "ranks", "batch": "samples per rank and step"}
SETTINGS = {}
NOTES = ("right(...) makes the sampler: next(rank) -> sample indices of this step for that rank; advance() after a step (all ranks); state_dict / load_state_dict. "
         "World size and batch are NOT part of the state, on purpose. Every sample comes exactly once per epoch over all ranks; nothing is dropped or padded, so length need not be divisible by world*batch. "
         "The cached permutation is rebuilt lazily and not saved. Global torch random state is neither read nor changed. Another length than at saving is refused.")


class Sampler:
    def __init__(self, length, seed, world, batch):
        self.length, self.seed, self.world, self.batch = length, seed, world, batch
        self.consumed = 0
        self._epoch, self._order = None, None

    def _at(self, position):
        epoch, i = divmod(position, self.length)
        if epoch != self._epoch:                               # filled lazily
            g = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.length, generator=g).tolist()
        return self._order[i]

    def next(self, rank):
        start = self.consumed + rank * self.batch
        return [self._at(p) for p in range(start, start + self.batch)]

    def advance(self):
        self.consumed += self.world * self.batch

    def state_dict(self):
        return {"seed": self.seed, "length": self.length, "consumed": self.consumed}

    def load_state_dict(self, state):
        if state["length"] != self.length:
            raise ValueError("another dataset")
        self.seed, self.consumed = state["seed"], state["consumed"]
        self._epoch = self._order = None                       # the cache belongs to the old seed


def make(seed):
    return {"length": 23 + seed % 4, "seed": seed, "world": 3, "batch": 2}


def right(length, seed, world, batch):
    return Sampler(length, seed, world, batch)


def run(s, steps):
    out = []
    for _ in range(steps):
        for r in range(s.world):
            out += s.next(r)
        s.advance()
    return out


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        n = d["length"]
        expect = []
        for e in range(6):
            expect += torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + e)).tolist()
        whole = run(right(**d), 16)                                       # 96 samples without a break
        assert whole == expect[:96] and sorted(whole[:n]) == list(range(n)) and sorted(whole[n:2 * n]) == list(range(n))
        for cut in (0, 1, 4, 9):
            a = right(**d)
            head = run(a, cut)
            b = right(**{**d, "seed": 99, "world": 1, "batch": 3})        # other ranks, other batch, other seed at construction
            b.next(0)                                                     # its cache is warm with the wrong seed
            b.load_state_dict(a.state_dict())
            assert head + run(b, (96 - 6 * cut) // 3) == expect[:96]
        before = torch.get_rng_state()
        run(right(**d), 5)
        assert torch.equal(before, torch.get_rng_state())
        print("length", n, "state", a.state_dict(), "resumed with 1 rank: same order")
