"""A prefetching loader whose state_dict is not the state of its reader (torchdata StatefulDataLoader, marin, grain): the reader runs ahead, so every batch carries a snapshot taken right after the batch was read, and the state that is saved is the snapshot of the last batch handed out. Saving the reader's own position would lose the batches in the queue."""
import copy
import random
from collections import deque

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"rows": "the dataset, list of ints", "stop": "number of batches that are trained on before the checkpoint", "more": "number of batches after the resume"}
SETTINGS = {"batch": "rows per batch, 3", "ahead": "batches that are prefetched, 4", "seed": "seed of the shuffling buffer, 0"}
NOTES = ("Reads rows in order through a shuffle buffer of 5 (endless: after the last row it starts again) and prefetches `ahead` batches. Trains on `stop` batches, saves the loader state, makes a new loader, loads the state and returns the next `more` batches. They are the batches that an "
         "uninterrupted loader would have given: nothing is skipped and nothing repeated. The saved state is the reader's snapshot (position, buffer, generator state) right after the last batch that was handed out, not the reader's present position, which is up to `ahead` batches further. Prefetched batches are read again after the resume.")


class _Reader:
    def __init__(self, rows, batch, seed):
        self.rows, self.batch, self.rng = rows, batch, random.Random(seed)
        self.pos, self.buf = 0, []

    def state(self):
        return copy.deepcopy((self.pos, self.buf, self.rng.getstate()))

    def load(self, s):
        self.pos, self.buf = s[0], list(s[1])
        self.rng.setstate(s[2])

    def read(self):
        out = []
        for _ in range(self.batch):
            while len(self.buf) < 5:
                self.buf.append(self.rows[self.pos % len(self.rows)])
                self.pos += 1
            out.append(self.buf.pop(self.rng.randrange(len(self.buf))))
        return out


class _Loader:
    def __init__(self, rows, batch, ahead, seed):
        self.reader, self.ahead, self.queue = _Reader(rows, batch, seed), ahead, deque()
        self.snapshot = self.reader.state()

    def __next__(self):
        while len(self.queue) <= self.ahead:
            b = self.reader.read()
            self.queue.append((b, self.reader.state()))
        b, self.snapshot = self.queue.popleft()
        return b

    def state_dict(self):
        return copy.deepcopy(self.snapshot)

    def load_state_dict(self, s):
        self.queue.clear()
        self.reader.load(s)
        self.snapshot = copy.deepcopy(s)


def make(seed):
    r = random.Random(seed)
    return {"rows": [100 + k for k in range(17)], "stop": r.randrange(1, 9), "more": 4}


def right(rows, stop, more, batch=3, ahead=4, seed=0):
    a = _Loader(rows, batch, ahead, seed)
    for _ in range(stop):
        next(a)
    saved = a.state_dict()
    b = _Loader(rows, batch, ahead, seed)
    b.load_state_dict(saved)
    return [next(b) for _ in range(more)]


if __name__ == "__main__":
    i = make(0)
    u = _Loader(i["rows"], 3, 4, 0)
    ref = [next(u) for _ in range(i["stop"] + 4)][i["stop"]:]
    print(i["stop"], right(**i), right(**i) == ref, all(right(i["rows"], s, 6) == (lambda l: [next(l) for _ in range(s + 6)][s:])(_Loader(i["rows"], 3, 4, 0)) for s in range(0, 30)))
