"""Concatenate-and-chunk stream whose checkpoint holds unfinished tokens (torchtitan HuggingFaceDataset: _token_buffer in state_dict). The state is a document index and the tokens left of the last document; without the buffer a resumed run would skip them. The blocks have block + 1 tokens and do not overlap."""
FAMILY = "packing"
KIND = "state"
INPUTS = {"documents": "list of token lists without EOS", "cut": "number of blocks to take before saving"}
SETTINGS = {"block": "block length, 8 (9 tokens are taken: inputs and shifted targets)", "eos": "token 0 behind each document"}
NOTES = "right(documents) gives the stream; state_dict() is plain JSON data and a copy; load_state_dict on a fresh stream continues exactly. The stream is infinite (wraps around the documents). Dropping one target per block border is intended, as torchtitan does. Attention crosses documents on purpose."
def make(seed):
    import random
    r = random.Random(seed)
    return {"documents": [[r.randint(1, 49) for _ in range(r.randint(1, 23))] for _ in range(7)], "cut": r.randint(1, 9)}

class PackedStream:
    def __init__(self, documents, block=8, eos=0):
        self.documents, self.block, self.eos = documents, block, eos
        self.next_document, self.epoch, self.buffer = 0, 0, []
    def __iter__(self):
        return self
    def __next__(self):
        while len(self.buffer) < self.block + 1:
            self.buffer += self.documents[self.next_document] + [self.eos]
            self.next_document += 1
            if self.next_document == len(self.documents):
                self.next_document = 0; self.epoch += 1
        out, self.buffer = self.buffer[:self.block + 1], self.buffer[self.block + 1:]
        return {"inputs": out[:-1], "targets": out[1:]}
    def state_dict(self):
        return {"next_document": self.next_document, "epoch": self.epoch, "buffer": list(self.buffer)}
    def load_state_dict(self, state):
        self.next_document, self.epoch, self.buffer = state["next_document"], state["epoch"], list(state["buffer"])

def right(documents, block=8, eos=0):
    return PackedStream(documents, block, eos)

if __name__ == "__main__":
    import json
    for seed in range(20):
        d = make(seed); s = right(d["documents"]); flat = sum((x + [0] for x in d["documents"]), []) * 40
        head = [next(s) for _ in range(d["cut"])]; saved = json.loads(json.dumps(s.state_dict())); tail = [next(s) for _ in range(12)]
        t = right(d["documents"]); t.load_state_dict(saved); assert [next(t) for _ in range(12)] == tail
        for i, b in enumerate(head + tail):
            assert b["inputs"] == flat[9 * i:9 * i + 8] and b["targets"] == flat[9 * i + 1:9 * i + 9]
    print("resumed exactly; buffer at the cut:", saved["buffer"])
