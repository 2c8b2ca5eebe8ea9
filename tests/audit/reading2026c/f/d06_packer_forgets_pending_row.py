"""A checkpoint taken between packs loses the row that did not fit. PrimeIntellect-ai/prime-rl#3032,
https://github.com/PrimeIntellect-ai/prime-rl/pull/3032 (review of 2026-07-14), 2026. When a row would overflow the pack, the packer yields the
pack before it stores the row it has already taken from the child iterator; its state holds only the child's position, so each resume drops one row."""
import random

FAMILY = "packing"
KIND = "state"
INPUTS = {"rows": "tokenized rows, list of lists of token ids", "save_after": "number of packs after which the run is saved and loaded in a new process"}
SETTINGS = {"capacity": "tokens per pack, 16"}
NOTES = ("Returns all packs of the run, those before the save and those after the load; each pack is a list of rows in the order read. Greedy: a "
         "row that does not fit opens the next pack. No row is longer than the capacity. The loaded run must give what the unbroken run gives.")

class Packer:
    def __init__(self, rows, capacity):
        self.rows, self.capacity, self.at, self.pack = rows, capacity, 0, []

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < len(self.rows):
            row = self.rows[self.at]
            self.at += 1
            if self.pack and sum(map(len, self.pack)) + len(row) > self.capacity:
                full, self.pack = self.pack, []
                yield full
            self.pack.append(row)
        if self.pack:
            full, self.pack = self.pack, []
            yield full

class PackerKeepingPending(Packer):
    def state_dict(self):
        return {"at": self.at, "pack": [list(r) for r in self.pack]}

    def load_state_dict(self, state):
        self.at, self.pack = state["at"], [list(r) for r in state["pack"]]

    def __iter__(self):
        while self.at < len(self.rows):
            row = self.rows[self.at]
            self.at += 1
            full = None
            if self.pack and sum(map(len, self.pack)) + len(row) > self.capacity:
                full, self.pack = self.pack, []
            self.pack.append(row)
            if full:
                yield full
        if self.pack:
            full, self.pack = self.pack, []
            yield full

def make(seed):
    r = random.Random(seed)
    return {"rows": [[r.randint(1, 49) for _ in range(r.randint(3, 9))] for _ in range(20)], "save_after": 3}

def resumed(cls, rows, save_after, capacity):
    first, packs = cls(rows, capacity), []
    for pack in first:
        packs.append(pack)
        if len(packs) == save_after:
            break
    state = first.state_dict()
    second = cls(rows, capacity)
    second.load_state_dict(state)
    return packs + list(second)

def broken(rows, save_after, capacity=16):
    return resumed(Packer, rows, save_after, capacity)

def right(rows, save_after, capacity=16):
    return resumed(PackerKeepingPending, rows, save_after, capacity)

if __name__ == "__main__":
    made = make(0)
    a, b = broken(**made), right(**made)
    unbroken = list(Packer(made["rows"], 16))
    print("rows seen: broken", sum(map(len, a)), "right", sum(map(len, b)), "of", len(made["rows"]))
    assert b == unbroken and sum(map(len, a)) == len(made["rows"]) - 1
