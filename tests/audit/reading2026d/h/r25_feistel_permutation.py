"""Stateless shuffled order: sample index = Feistel network with cycle walking on the global position, so no permutation is stored and resuming needs the step alone. It is an exact permutation of any n per epoch, not sampling with replacement."""
FAMILY = "seeds"; KIND = "seeds"
INPUTS = {"rank": "data-parallel rank", "step": "step of one sample per rank"}
SETTINGS = {"world": "4", "n": "dataset size, 37", "key": "9"}
NOTES = "Epochs have different orders. Positions run over epochs without dropping the tail: world need not divide n. Changing world keeps the global order."
import hashlib
def make(seed): return {"rank": seed % 4, "step": seed}
def perm(i, n, key):
    h = 1
    while (1 << (2 * h)) < n: h += 1
    mask = (1 << h) - 1
    while True:
        l, r = i >> h, i & mask
        for rnd in range(6):
            f = int.from_bytes(hashlib.blake2b(f"{key},{rnd},{r}".encode(), digest_size=4).digest(), "little")
            l, r = r, l ^ (f & mask)
        i = (l << h) | r
        if i < n: return i
def right(rank, step, world=4, n=37, key=9):
    epoch, i = divmod(step * world + rank, n)
    return perm(i, n, key * 1_000_003 + epoch)
if __name__ == "__main__":
    seq = [right(r, s) for s in range(37) for r in range(4)]
    for e in range(4): assert sorted(seq[e * 37:(e + 1) * 37]) == list(range(37))
    assert seq[:37] != seq[37:74] and seq[:36] == [right(r, s, world=2) for s in range(18) for r in range(2)]; print(seq[:20])
