"""Resumable loader with prefetch: the saved position is what was CONSUMED, not what was fetched, so prefetched items are dropped and read again (torchdata StatefulDataLoader). The shuffle order is rebuilt from (seed, epoch), not from a saved generator state."""
FAMILY = "saving and resuming"; KIND = "state"
INPUTS = {"n": "dataset size", "k": "items consumed before saving"}
SETTINGS = {"prefetch": "3", "seed": "4"}
NOTES = "right(n, k) -> (items before saving, state, items after loading until the end of the next epoch). Re-reading prefetched items is right: nothing is seen twice by the training."
import random, collections, json
class Loader:
    def __init__(self, n, prefetch=3, seed=4): self.n, self.pf, self.seed, self.epoch, self.done, self.buf, self.next = n, prefetch, seed, 0, 0, collections.deque(), 0
    def order(self): o = list(range(self.n)); random.Random(self.seed * 1000 + self.epoch).shuffle(o); return o
    def __next__(self):
        if self.done == self.n: self.epoch += 1; self.done = self.next = 0; self.buf.clear()
        o = self.order()
        while len(self.buf) < self.pf and self.next < self.n: self.buf.append(o[self.next]); self.next += 1
        self.done += 1; return self.buf.popleft()
    def state_dict(self): return {"epoch": self.epoch, "done": self.done}
    def load_state_dict(self, s): self.epoch, self.done, self.next = s["epoch"], s["done"], s["done"]; self.buf.clear()
def make(seed): return {"n": 7 + seed % 3, "k": 4 + seed % 9}
def right(n, k, prefetch=3, seed=4):
    a = Loader(n, prefetch, seed); before = [next(a) for _ in range(k)]; s = json.loads(json.dumps(a.state_dict()))
    b = Loader(n, prefetch, seed); b.load_state_dict(s); return before, s, [next(b) for _ in range(3 * n - k)]
if __name__ == "__main__":
    for n in (1, 5, 8):
        for k in range(0, 2 * n):
            c = Loader(n); full = [next(c) for _ in range(3 * n)]; b, s, a = right(n, k); assert b + a == full, (n, k)
    print(right(5, 7))
