"""The sampler saves the global numpy generator, not its own. deepspeedai/DeepSpeed#8405,
https://github.com/deepspeedai/DeepSpeed/issues/8405, 2026. The curriculum data sampler draws from self.np_rng =
np.random.default_rng(seed), but state_dict() stored np.random.get_state() and load_state_dict() restored that. A resumed
run began the sampler's stream again from the seed: the same mix of clusters per step, the same shuffles."""
import numpy as np

FAMILY = "data stages"
KIND = "state"
INPUTS = {"cluster_sizes": "number of samples of each difficulty cluster"}
SETTINGS = {"batch_size": "samples per global batch, 6", "seed": "seed of the sampler, 1234"}
NOTES = ("broken/right build a sampler with next_batch() -> list of (cluster, sample), state_dict() and "
         "load_state_dict(state). A fresh sampler that loads the state continues exactly where the saved one stood.")


class Base:
    def __init__(self, cluster_sizes, batch_size, seed):
        self.sizes, self.batch_size = list(cluster_sizes), batch_size
        self.np_rng = np.random.default_rng(seed)
        self.clusters = [np.arange(n) for n in self.sizes]
        for c in self.clusters:
            self.np_rng.shuffle(c)
        self.position = [0] * len(self.sizes)
        self.consumed = 0

    def next_batch(self):
        p = np.array(self.sizes) / sum(self.sizes)
        counts = np.bincount(self.np_rng.choice(len(self.sizes), self.batch_size, replace=True, p=p), minlength=len(self.sizes))
        batch = []
        for c, n in enumerate(counts):
            for _ in range(int(n)):
                if self.position[c] == self.sizes[c]:
                    self.np_rng.shuffle(self.clusters[c])
                    self.position[c] = 0
                batch.append((c, int(self.clusters[c][self.position[c]])))
                self.position[c] += 1
        batch = [batch[i] for i in self.np_rng.permutation(len(batch))]
        self.consumed += self.batch_size
        return batch

    def state_dict(self):
        return {"consumed": self.consumed, "clusters": [c.copy() for c in self.clusters], "position": list(self.position),
                "np_rng_state": self.rng_state()}

    def load_state_dict(self, state):
        self.consumed, self.position = state["consumed"], list(state["position"])
        self.clusters = [c.copy() for c in state["clusters"]]
        self.set_rng_state(state["np_rng_state"])


class BrokenSampler(Base):
    def rng_state(self):
        return np.random.get_state()

    def set_rng_state(self, state):
        np.random.set_state(state)


class RightSampler(Base):
    def rng_state(self):
        return self.np_rng.bit_generator.state

    def set_rng_state(self, state):
        self.np_rng.bit_generator.state = state


def make(seed):
    return {"cluster_sizes": [5, 9, 14], "batch_size": 6, "seed": 1234 + seed}


def broken(cluster_sizes, batch_size=6, seed=1234):
    return BrokenSampler(cluster_sizes, batch_size, seed)


def right(cluster_sizes, batch_size=6, seed=1234):
    return RightSampler(cluster_sizes, batch_size, seed)


if __name__ == "__main__":
    same = {}
    for f in (broken, right):
        a = f(**make(0))
        for _ in range(4):
            a.next_batch()
        b = f(**make(0))
        b.load_state_dict(a.state_dict())
        x, y = [a.next_batch() for _ in range(3)], [b.next_batch() for _ in range(3)]
        same[f.__name__] = x == y
        print(f.__name__, "resumed equals uninterrupted:", x == y, x[0], y[0])
    assert same == {"broken": False, "right": True}
