"""Pretraining chunks that overlap by one token and cross document borders (nanoGPT, Megatron GPTDataset, GPT-3).
Documents are joined with an end mark and cut every `length` tokens, each chunk with length+1 tokens: the last token of a chunk is only a target there and is the first
input of the next chunk. So each token but the first is a target once. Documents may see each other in a chunk; there is no mask. The rest at the end is dropped."""
FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with ids (a document)"}
SETTINGS = {"length": "inputs per chunk, 8", "eos": "end mark, 0"}
NOTES = ("Out: rows with ids of length+1 tokens; inputs are ids[:-1], targets ids[1:]. The shared token is meant. A tail with fewer than length+1 tokens is dropped. The number of rows out has "
         "nothing to do with the number of documents; one document may be in several chunks.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"ids": torch.randint(1, 40, (int(n),), generator=g).tolist()} for n in torch.randint(2, 15, (6,), generator=g)]}


def right(rows, length=8, eos=0):
    stream = []
    for row in rows:
        stream += row["ids"] + [eos]
    return [{"ids": stream[i:i + length + 1]} for i in range(0, len(stream) - length, length)]


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    stream = [t for r in rows for t in r["ids"] + [0]]
    targets = [t for o in out for t in o["ids"][1:]]
    print(len(stream), "tokens ->", len(out), "chunks,", len(targets), "targets")
    assert all(len(o["ids"]) == 9 for o in out)
    assert targets == stream[1:1 + len(targets)] and len(stream) - 1 - len(targets) < 8
