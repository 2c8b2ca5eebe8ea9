"""The state of a shuffled stream holds the source position but not the shuffle buffer.
huggingface/datasets#8408, https://github.com/huggingface/datasets/pull/8408 (discussion in #7901), 2026 (August).
On resume the buffer starts empty with a fresh generator while the source continues where it was. The
rows that sat in the buffer are never seen, about buffer_size of them at every restart."""
import random

FAMILY = 'data'
KIND = 'state'
INPUTS = {
    'rows': 'the rows of the source, in order',
}
SETTINGS = {
    'buffer_size': 'rows held for shuffling, 8',
    'seed': 'seed of the shuffle, 0',
}
NOTES = (
    'A stream object with iteration, state_dict() and load_state_dict(). Resuming from a saved state '
    'continues exactly: each row of the pass is delivered once, in the order of a pass without a '
    'break. '
)


def make(seed):
    return {"rows": [{"id": i + 1000 * seed} for i in range(40)]}


class Stream:
    def __init__(self, rows, buffer_size, seed, keep_buffer):
        self.rows, self.size, self.keep = rows, buffer_size, keep_buffer
        self.rng, self.at, self.buffer = random.Random(seed), 0, []

    def __iter__(self):
        while True:
            while len(self.buffer) < self.size and self.at < len(self.rows):
                self.buffer.append(self.rows[self.at])
                self.at += 1
            if not self.buffer:
                return
            yield self.buffer.pop(self.rng.randrange(len(self.buffer)))

    def state_dict(self):
        state = {"at": self.at}
        if self.keep:
            state.update(buffer=list(self.buffer), rng=self.rng.getstate())
        return state

    def load_state_dict(self, state):
        self.at = state["at"]
        if self.keep:
            self.buffer = list(state["buffer"])
            self.rng.setstate(state["rng"])


def broken(rows, buffer_size=8, seed=0):
    return Stream(rows, buffer_size, seed, keep_buffer=False)


def right(rows, buffer_size=8, seed=0):
    return Stream(rows, buffer_size, seed, keep_buffer=True)


def resumed_pass(build, rows, stop):
    first = build(rows)
    seen = []
    for row in first:
        seen.append(row["id"])
        if len(seen) == stop:
            break
    state = first.state_dict()
    second = build(rows)
    second.load_state_dict(state)
    return seen + [row["id"] for row in second]


if __name__ == "__main__":
    rows = make(0)["rows"]
    whole = [r["id"] for r in right(rows)]
    for f in (broken, right):
        got = resumed_pass(f, rows, 15)
        print(f.__name__, "delivered", len(got), "never seen", sorted(set(whole) - set(got)))
    assert resumed_pass(right, rows, 15) == whole
    assert len(resumed_pass(broken, rows, 15)) < len(whole)
    assert [r["id"] for r in broken(rows)] == whole
