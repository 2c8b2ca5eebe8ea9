"""Resumable sampler counted in consumed samples (Megatron MegatronPretrainingRandomSampler, Mosaic StreamingDataset). The state is ONE integer, no generator state: the permutation
of an epoch is a function of seed + epoch, so a checkpoint of 4 ranks resumes on 2 ranks with other batch sizes and still sees each sample once."""
import torch

FAMILY = "saving and resuming"
KIND = "state"
INPUTS = {"size": "number of samples of the data set", "rank": "0 .. world - 1", "world": "number of ranks", "batch": "samples per rank and step"}
SETTINGS = {"seed": "0"}
NOTES = ("next_batch() gives this rank's sample numbers and moves the global counter by batch * world on every rank alike. An epoch border may fall inside a batch: the rest comes from the "
         "next permutation, nothing is dropped or repeated. Saved: consumed samples (all ranks together). No exact number of ranks is needed.")


def make(seed):
    return {"size": 10 + seed, "rank": 0, "world": 2, "batch": 3}


class right:
    def __init__(self, size, rank, world, batch, seed=0):
        self.size, self.rank, self.world, self.batch, self.seed = size, rank, world, batch, seed
        self.consumed, self._epoch, self._perm = 0, None, None

    def _sample(self, position):
        epoch, offset = divmod(position, self.size)
        if epoch != self._epoch:                                  # lazily filled; never saved
            g = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._perm = epoch, torch.randperm(self.size, generator=g).tolist()
        return self._perm[offset]

    def next_batch(self):
        first = self.consumed + self.rank * self.batch
        out = [self._sample(first + i) for i in range(self.batch)]
        self.consumed += self.batch * self.world
        return out

    def state_dict(self):
        return {"consumed": self.consumed}

    def load_state_dict(self, state):
        self.consumed = state["consumed"]


if __name__ == "__main__":
    stream = [right(17, 0, 1, 1)]; whole = [stream[0].next_batch()[0] for _ in range(68)]
    seen, ranks = [], [right(17, r, 4, 2) for r in range(4)]
    for _ in range(3):
        seen += sum((r.next_batch() for r in ranks), [])
    state = ranks[2].state_dict()
    ranks = [right(17, r, 2, 5) for r in range(2)]
    for r in ranks:
        r.load_state_dict(dict(state))
    for _ in range(4):
        seen += sum((r.next_batch() for r in ranks), [])
    print(state, seen); assert seen == whole[:64]
    assert all(sorted(seen[i:i + 17]) == list(range(17)) for i in (0, 17, 34))
