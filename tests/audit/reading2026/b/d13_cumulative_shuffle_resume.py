"""The next epoch shuffles the already shuffled data, but resuming shuffles the original. pytorch/torchtitan#2864,
https://github.com/pytorch/torchtitan/issues/2864, 2026.
At each new epoch the dataset is replaced by dataset.shuffle(seed + epoch), on top of the order of the epoch before. Loading a checkpoint applies the one
shuffle of the current epoch to the original data. After the first re-loop a resumed run reads another order: samples are repeated and left out."""
import random

FAMILY = "data stages"
KIND = "state"
INPUTS = {"rows": "list of training rows"}
SETTINGS = {"seed": "shuffle seed, 42"}
NOTES = ("A stateful reader: next() gives rows for ever, each epoch is one pass in an order that depends on seed + epoch; state_dict / load_state_dict must continue "
         "exactly where the saved run would have gone on.")


def _shuffled(rows, seed):
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows


class broken:
    def __init__(self, rows, seed=42):
        self.seed, self.epoch, self.i = seed, 0, 0
        self.data = _shuffled(rows, seed)
        self.original = list(rows)

    def next(self):
        if self.i == len(self.data):
            self.epoch, self.i = self.epoch + 1, 0
            self.data = _shuffled(self.data, self.seed + self.epoch)
        self.i += 1
        return self.data[self.i - 1]

    def state_dict(self):
        return {"epoch": self.epoch, "i": self.i}

    def load_state_dict(self, s):
        self.epoch, self.i = s["epoch"], s["i"]
        self.data = _shuffled(self.original, self.seed + self.epoch)


class right:
    def __init__(self, rows, seed=42):
        self.seed, self.epoch, self.i = seed, 0, 0
        self.original = list(rows)
        self.data = _shuffled(rows, seed)

    def next(self):
        if self.i == len(self.data):
            self.epoch, self.i = self.epoch + 1, 0
            self.data = _shuffled(self.original, self.seed + self.epoch)
        self.i += 1
        return self.data[self.i - 1]

    def state_dict(self):
        return {"epoch": self.epoch, "i": self.i}

    def load_state_dict(self, s):
        self.epoch, self.i = s["epoch"], s["i"]
        self.data = _shuffled(self.original, self.seed + self.epoch)


def make(seed):
    return {"rows": [f"row{seed}-{k}" for k in range(10)]}


if __name__ == "__main__":
    res = {}
    for name, cls in (("broken", broken), ("right", right)):
        for stop in (4, 14):
            a = cls(**make(0))
            for _ in range(stop):
                a.next()
            s = a.state_dict()
            b = cls(**make(0))
            b.load_state_dict(s)
            x, y = [a.next() for _ in range(12)], [b.next() for _ in range(12)]
            res[name, stop] = x == y
            print(name, "resume after", stop, "continues the same:", x == y)
    assert res["right", 4] and res["right", 14] and res["broken", 4] is not None and not res["broken", 14]
