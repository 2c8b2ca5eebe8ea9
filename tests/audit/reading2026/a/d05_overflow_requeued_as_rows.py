"""Best-fit packing requeues the overflow of a conversation as a document of its own. huggingface/trl#5075,
https://github.com/huggingface/trl/issues/5075, 2026. With the 'bfd' strategy of v0.27 the tokens beyond seq_length were
not dropped but queued and packed like any other sequence. For conversations this makes documents that start in the
middle of an answer, without prompt, and they are trained as if they were whole samples."""
FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "list of tokenized conversations, {'ids': list of ids}, each starting with the user tag (id 1)"}
SETTINGS = {"seq_length": "length of a packed row, 10"}
NOTES = ("Best-fit decreasing. Rows are conversations: one longer than seq_length is cut at its end, the overflow is "
         "discarded. Each packed row carries 'seq_lengths', which the attention uses as document boundaries.")
import random

def make(seed):
    rng = random.Random(seed)
    rows = [{"ids": [1] + [rng.randrange(5, 40) for _ in range(n - 1)]} for n in (13, 11, 4, 6, 3, 10, 5, 16)]
    return {"rows": rows}

def _best_fit(sequences, seq_length):
    bins = []
    for seq in sorted(sequences, key=len, reverse=True):
        fitting = [b for b in bins if sum(map(len, b)) + len(seq) <= seq_length]
        if fitting:
            max(fitting, key=lambda b: sum(map(len, b))).append(seq)
        else:
            bins.append([seq])
    return [{"ids": sum(b, []), "seq_lengths": [len(s) for s in b]} for b in bins]

def broken(rows, seq_length=10):
    sequences = []
    for row in rows:
        ids = row["ids"]
        sequences += [ids[i:i + seq_length] for i in range(0, len(ids), seq_length)]
    return _best_fit(sequences, seq_length)

def right(rows, seq_length=10):
    return _best_fit([row["ids"][:seq_length] for row in rows], seq_length)

def _headless(packed):
    bad = 0
    for row in packed:
        start = 0
        for n in row["seq_lengths"]:
            bad += row["ids"][start] != 1
            start += n
    return bad

if __name__ == "__main__":
    b, r = broken(**make(0)), right(**make(0))
    print("documents that do not start with the user tag:", _headless(b), _headless(r))
    print("documents:", sum(len(x["seq_lengths"]) for x in b), sum(len(x["seq_lengths"]) for x in r))
    assert _headless(b) > 0 and _headless(r) == 0
