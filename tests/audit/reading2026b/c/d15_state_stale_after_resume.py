"""Second resume starts the data from the beginning. huggingface/datasets#8295, https://github.com/huggingface/datasets/pull/8295, 2026.
The dataset keeps a reference to the state dict of its example reader. Loading a state called the reader's _init_state_dict, which bound a new dict to the reader, so the
dataset's reference pointed to the old one. Reading resumed at the right place, but every state saved afterwards was the initial one; the next resume replayed the data from row 0."""
import copy

FAMILY = "data stages"
KIND = "state"
INPUTS = {"rows": "the rows of a streamed dataset, in shards (a list of lists)"}
SETTINGS = {}
NOTES = "Makes a dataset with __iter__, state_dict and load_state_dict. Loading a saved state and iterating goes on with the row after the last one read; this holds for any number of save and load cycles."


class Reader:
    def __init__(self, shards):
        self.shards, self.state = shards, None

    def init_state(self):
        self.state = {"shard": 0, "row": 0}
        return self.state

    def load(self, new):
        self.init_state()
        self.state.update(new)
        return self.state

    def __iter__(self):
        for s in range(self.state["shard"], len(self.shards)):
            for r in range(self.state["row"], len(self.shards[s])):
                self.state["row"] = r + 1
                yield self.shards[s][r]
            self.state["shard"], self.state["row"] = s + 1, 0


class Stream:
    def __init__(self, shards):
        self.reader, self.pending, self.state = Reader(shards), None, None

    def load_state_dict(self, state):
        self.pending = copy.deepcopy(state)

    def state_dict(self):
        return copy.deepcopy(self.state)

    def prepare(self):
        raise NotImplementedError

    def __iter__(self):
        self.prepare()
        yield from self.reader


class Broken(Stream):
    def prepare(self):
        self.state = {"examples": self.reader.init_state()}
        if self.pending is not None:
            self.reader.load(self.pending["examples"])


class Right(Stream):
    def prepare(self):
        self.state = {"examples": self.reader.init_state()}
        if self.pending is not None:
            self.state["examples"] = self.reader.load(self.pending["examples"])


def make(seed):
    return {"rows": [[f"s{s}r{r}" for r in range(3 + (s + seed) % 2)] for s in range(4)]}


def broken(rows):
    return Broken(rows)


def right(rows):
    return Right(rows)


def run(f, rows, parts=(3, 4, 4)):
    seen, state = [], None
    for n in parts:
        ds = f(rows)
        if state is not None:
            ds.load_state_dict(state)
        it = iter(ds)
        seen += [next(it) for _ in range(n)]
        state = ds.state_dict()
    return seen


if __name__ == "__main__":
    rows = make(0)["rows"]
    flat = [x for s in rows for x in s]
    for f in (broken, right):
        print(f.__name__, run(f, rows))
    assert run(right, rows) == flat[:11] != run(broken, rows) and run(broken, rows)[:7] == flat[:7]
