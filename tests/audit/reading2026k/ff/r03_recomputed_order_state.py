"""A sampler whose saved state has no order and no random state: only how many samples were given out. The order of an epoch is
drawn from seed + epoch each time it is needed, a batch runs over the end of an epoch into the next one, and the batch size may differ
after the restart (Megatron-LM's consumed_samples, nanotron, mosaicml-streaming). Looks as if the shuffle state were not saved."""
import torch

FAMILY = "schedules, updates, and saved or cached state"
KIND = "state"
INPUTS = {"n": "number of samples of the data set, 11"}
SETTINGS = {"batch_size": "4 (does not divide 11, on purpose)", "seed": "3"}
NOTES = ("right makes an object: next_batch() -> list of batch_size sample indices, state_dict(), load_state_dict(). The stream is endless: the permutations of epochs 0, 1, 2, ... one after the other, "
         "cut into batches, so a batch may hold the tail of one epoch and the head of the next (an index may then appear twice in a batch). Every epoch has each index once, each epoch in another order. "
         "A fresh object that loads the state goes on exactly there. The state is one integer.")


def make(seed):
    return {"n": 11}


class _Sampler:
    def __init__(self, n, batch_size, seed):
        self.n, self.batch_size, self.seed = n, batch_size, seed
        self.consumed = 0
        self._epoch, self._order = None, None

    def _index(self, i):
        epoch, k = divmod(i, self.n)
        if epoch != self._epoch:
            g = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.n, generator=g).tolist()
        return self._order[k]

    def next_batch(self):
        out = [self._index(self.consumed + j) for j in range(self.batch_size)]
        self.consumed += self.batch_size
        return out

    def state_dict(self):
        return {"consumed_samples": self.consumed}

    def load_state_dict(self, state):
        self.consumed = state["consumed_samples"]


def right(n, batch_size=4, seed=3):
    return _Sampler(n, batch_size, seed)


if __name__ == "__main__":
    a = right(11)
    stream = [i for _ in range(11) for i in a.next_batch()]
    for e in range(4):
        assert sorted(stream[11 * e:11 * e + 11]) == list(range(11))
    assert stream[:11] != stream[11:22]
    a = right(11)
    head = [i for _ in range(5) for i in a.next_batch()]
    b = right(11)
    b.load_state_dict(a.state_dict())
    tail = [i for _ in range(6) for i in b.next_batch()]
    print("resumed stream equal:", head + tail == stream)
    assert head + tail == stream
