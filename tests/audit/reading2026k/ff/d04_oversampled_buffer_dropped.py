"""Rollouts buffered at the checkpoint are skipped on resume. OpenRLHF/OpenRLHF#1322,
https://github.com/OpenRLHF/OpenRLHF/issues/1322, 2026. With a generation batch larger than the training batch the generator takes a
full generation batch from the prompt loader and keeps the surplus in a sample buffer. The checkpoint holds only the loader's
position; after a restart the loader goes on behind all generated prompts and the buffer is empty, so what was generated but not
trained is never trained."""
import torch

FAMILY = "schedules, updates, and saved or cached state"
KIND = "state"
INPUTS = {"prompts": "list of prompt ids, each to be trained once per epoch"}
SETTINGS = {"gen_batch": "prompts drawn from the loader at a time, 6", "train_batch": "prompts given to a training step, 2"}
NOTES = ("broken/right make an iterator-like object: next_batch() -> list of train_batch prompt ids, state_dict(), load_state_dict(). The state is "
         "plain Python and is taken between two training steps. Over one epoch every prompt is handed out exactly once, in loader order, with or "
         "without an interruption. Deterministic, no randomness; len(prompts) is a multiple of gen_batch.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"prompts": torch.randperm(24, generator=g).tolist()}


class _Generator:
    def __init__(self, prompts, gen_batch, train_batch):
        self.prompts, self.gen_batch, self.train_batch = prompts, gen_batch, train_batch
        self.cursor, self.buffer = 0, []

    def next_batch(self):
        while len(self.buffer) < self.train_batch:
            if self.cursor >= len(self.prompts):
                raise StopIteration
            self.buffer += self.prompts[self.cursor:self.cursor + self.gen_batch]
            self.cursor += self.gen_batch
        out, self.buffer = self.buffer[:self.train_batch], self.buffer[self.train_batch:]
        return out


class _Broken(_Generator):
    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state):
        self.cursor = state["cursor"]


class _Right(_Generator):
    def state_dict(self):
        return {"cursor": self.cursor, "buffer": list(self.buffer)}

    def load_state_dict(self, state):
        self.cursor, self.buffer = state["cursor"], list(state["buffer"])


def broken(prompts, gen_batch=6, train_batch=2):
    return _Broken(prompts, gen_batch, train_batch)


def right(prompts, gen_batch=6, train_batch=2):
    return _Right(prompts, gen_batch, train_batch)


if __name__ == "__main__":
    for f in (broken, right):
        p = make(0)["prompts"]
        a = f(p)
        seen = [i for _ in range(4) for i in a.next_batch()]
        b = f(p)
        b.load_state_dict(a.state_dict())
        try:
            while True:
                seen += b.next_batch()
        except StopIteration:
            pass
        print(f.__name__, len(seen), "of", len(p), "prompts trained")
        assert (seen == p) == (f is right)
