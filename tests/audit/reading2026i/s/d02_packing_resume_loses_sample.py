"""Greedy packing loses the sample in flight when it is resumed from a checkpoint. pytorch/torchtitan#3008, https://github.com/pytorch/torchtitan/pull/3008, 2026.
The packing dataset pulls a sample, sees that it does not fit the buffer, yields the full buffer and only then puts the sample
into the new buffer. While the generator is suspended at that yield the sample lives only in the generator's frame; the saved index
already counts it as read. After load_state_dict a fresh generator starts with the following sample, so each resume silently skips one sample.
The fix keeps the sample in flight in the state."""
import torch

FAMILY = "packing"
KIND = "state"
INPUTS = {"rows": "list of token id lists (documents), each at most seq_len long"}
SETTINGS = {"seq_len": "length of a packed row, 16"}
NOTES = ("broken/right return an iterable dataset with state_dict() and load_state_dict(); saving between two packed rows and continuing in a new object "
         "must give the same rows as an uninterrupted pass. Rows are padded with 0 at the end; 'doc' is the document number within the row, -1 for padding. "
         "Documents are never cut. One pass over the data, no shuffling.")


class _Packed:
    def __init__(self, rows, seq_len):
        self.rows, self.seq_len = rows, seq_len
        self._index = 0
        self._buffer, self._doc = [], []

    def _add(self, sample):
        number = self._doc[-1] + 1 if self._doc else 0
        self._buffer += sample
        self._doc += [number] * len(sample)

    def _flush(self):
        pad = self.seq_len - len(self._buffer)
        row = {"input_ids": torch.tensor(self._buffer + [0] * pad), "doc": torch.tensor(self._doc + [-1] * pad)}
        self._buffer, self._doc = [], []
        return row


class _BrokenPacked(_Packed):
    def __iter__(self):
        while self._index < len(self.rows):
            sample = self.rows[self._index]
            self._index += 1
            if len(self._buffer) + len(sample) > self.seq_len:
                yield self._flush()
            self._add(sample)
        if self._buffer:
            yield self._flush()

    def state_dict(self):
        return {"index": self._index, "buffer": list(self._buffer), "doc": list(self._doc)}

    def load_state_dict(self, state):
        self._index, self._buffer, self._doc = state["index"], list(state["buffer"]), list(state["doc"])


class _RightPacked(_Packed):
    def __init__(self, rows, seq_len):
        super().__init__(rows, seq_len)
        self._pending = []

    def __iter__(self):
        if self._pending:
            sample, self._pending = self._pending, []
            self._add(sample)
        while self._index < len(self.rows):
            sample = self.rows[self._index]
            self._index += 1
            if len(self._buffer) + len(sample) > self.seq_len:
                self._pending = sample
                yield self._flush()
                self._pending = []
            self._add(sample)
        if self._buffer:
            yield self._flush()

    def state_dict(self):
        return {"index": self._index, "buffer": list(self._buffer), "doc": list(self._doc), "pending": list(self._pending)}

    def load_state_dict(self, state):
        self._index, self._buffer, self._doc = state["index"], list(state["buffer"]), list(state["doc"])
        self._pending = list(state["pending"])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 11, (14,), generator=g).tolist()
    return {"rows": [torch.randint(1, 50, (n,), generator=g).tolist() for n in lengths]}


def broken(rows, seq_len=16):
    return _BrokenPacked(rows, seq_len)


def right(rows, seq_len=16):
    return _RightPacked(rows, seq_len)


def _resumed(build, rows, stop):
    first, out = build(rows), []
    for row in first:
        out.append(row)
        if len(out) == stop:
            break
    second = build(rows)
    second.load_state_dict(first.state_dict())
    return out + list(second)


if __name__ == "__main__":
    rows = make(0)["rows"]
    full = [r["input_ids"].tolist() for r in broken(rows)]
    assert full == [r["input_ids"].tolist() for r in right(rows)]
    for name, build in (("broken", broken), ("right", right)):
        got = [r["input_ids"].tolist() for r in _resumed(build, rows, 3)]
        print(name, "tokens without stop", sum(t > 0 for r in full for t in r), "with one resume", sum(t > 0 for r in got for t in r), "equal", got == full)
    assert [r["input_ids"].tolist() for r in _resumed(right, rows, 3)] == full
    assert [r["input_ids"].tolist() for r in _resumed(broken, rows, 3)] != full
