"""Packing stream whose checkpoint holds raw left-over tokens (torchtitan's HuggingFaceTextDataset keeps its token buffer in state_dict). The left-over of an epoch runs on into the next epoch instead of being dropped, and the shuffled order is not saved: it is remade lazily from seed + epoch after loading."""
FAMILY = "packing"
KIND = "state"
INPUTS = {"docs": "list of token lists", "seq_len": "row length"}
SETTINGS = {"seed": "shuffle seed, 0"}
NOTES = "right(docs, seq_len, seed) makes the stream: an endless iterator with state_dict() / load_state_dict(). State: epoch, next document, token buffer (copied both ways). The _order cache is dropped on load and refilled lazily. Resuming gives exactly the rows of an uninterrupted run. The docs must be the same and not all empty."
import random


class PackedStream:
    def __init__(self, docs, seq_len, seed=0):
        self.docs, self.seq_len, self.seed = docs, seq_len, seed
        self.epoch, self.next_doc, self.buffer, self._order = 0, 0, [], None

    def __iter__(self):
        return self

    def __next__(self):
        while len(self.buffer) < self.seq_len:
            if self.next_doc == len(self.docs):
                self.epoch, self.next_doc, self._order = self.epoch + 1, 0, None
            if self._order is None:
                self._order = list(range(len(self.docs)))
                random.Random(self.seed * 100003 + self.epoch).shuffle(self._order)
            self.buffer = self.buffer + self.docs[self._order[self.next_doc]]
            self.next_doc += 1
        row, self.buffer = self.buffer[:self.seq_len], self.buffer[self.seq_len:]
        return row

    def state_dict(self):
        return {"epoch": self.epoch, "next_doc": self.next_doc, "buffer": list(self.buffer)}

    def load_state_dict(self, s):
        self.epoch, self.next_doc, self.buffer, self._order = s["epoch"], s["next_doc"], list(s["buffer"]), None


def make(seed):
    r = random.Random(seed)
    return {"docs": [[r.randint(1, 31) for _ in range(r.randint(1, 12))] for _ in range(7)], "seq_len": 5}


def right(docs, seq_len, seed=0):
    return PackedStream(docs, seq_len, seed)


if __name__ == "__main__":
    b = make(0)
    whole = right(**b)
    rows = [next(whole) for _ in range(40)]
    for cut in range(40):
        first = right(**b)
        for _ in range(cut):
            next(first)
        s = first.state_dict()
        next(first)
        second = right(**b)
        second.load_state_dict(s)
        assert [next(second) for _ in range(40 - cut)] == rows[cut:]
    total = sum(map(len, b["docs"]))
    flat = sum(rows, [])
    assert sorted(flat[:total]) == sorted(sum(b["docs"], [])) == sorted(flat[total:2 * total])
    print("epoch", whole.epoch, "left-over", whole.buffer, "; resumed equal at all 40 cuts")
