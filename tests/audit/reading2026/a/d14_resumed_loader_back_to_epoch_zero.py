"""A loader resumed in the middle of an epoch falls back to the order of epoch 0. huggingface/accelerate#4071,
https://github.com/huggingface/accelerate/pull/4071, 2026. skip_first_batches builds a new DataLoaderShard whose iteration
counter is 0, and __iter__ calls set_epoch(iteration), which overrides the epoch that the trainer had just set. After the
resume the rest of the epoch follows another permutation: some samples come twice, others never."""
import random
FAMILY = "data"
KIND = "state"
INPUTS = {"size": "samples in the data set", "batch_size": "samples per batch", "seed": "base seed of the shuffle",
          "epoch": "epoch in which the run was interrupted, from 0", "done": "batches of that epoch trained before the save"}
SETTINGS = {}
NOTES = ("Returns the batches (sample indices) that the resumed run trains in the rest of the epoch. They are those that the "
         "uninterrupted run would have trained. The order of epoch e is the shuffle with seed + e.")

def make(seed):
    return {"size": 20, "batch_size": 4, "seed": seed, "epoch": 1, "done": 2}

class Sampler:
    def __init__(self, size, batch_size, seed):
        self.size, self.batch_size, self.seed, self.epoch = size, batch_size, seed, 0
    def __iter__(self):
        order = list(range(self.size))
        random.Random(self.seed + self.epoch).shuffle(order)
        return iter([order[i:i + self.batch_size] for i in range(0, self.size, self.batch_size)])

class Loader:
    def __init__(self, sampler, skip=0):
        self.sampler, self.skip, self.iteration = sampler, skip, 0
    def set_epoch(self, epoch):
        self.iteration = epoch
        self.sampler.epoch = epoch
    def __iter__(self):
        self.set_epoch(self.iteration)
        yield from list(self.sampler)[self.skip:]
        self.iteration += 1

def uninterrupted(size, batch_size, seed, epoch, done):
    loader = Loader(Sampler(size, batch_size, seed))
    for _ in range(epoch):
        list(loader)
    return list(loader)[done:]

def broken(size, batch_size, seed, epoch, done):
    def skip_first_batches(loader, n):
        return Loader(loader.sampler, skip=n)
    loader = Loader(Sampler(size, batch_size, seed))
    loader.set_epoch(epoch)
    return list(skip_first_batches(loader, done))

def right(size, batch_size, seed, epoch, done):
    def skip_first_batches(loader, n):
        new = Loader(loader.sampler, skip=n)
        new.iteration = loader.iteration
        return new
    loader = Loader(Sampler(size, batch_size, seed))
    loader.set_epoch(epoch)
    return list(skip_first_batches(loader, done))

if __name__ == "__main__":
    d = make(0)
    print("uninterrupted", uninterrupted(**d))
    print("broken       ", broken(**d))
    print("right        ", right(**d))
    assert right(**d) == uninterrupted(**d) != broken(**d)
