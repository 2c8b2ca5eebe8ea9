"""Shuffling without a permutation array: a keyed Feistel network with cycle walking maps (epoch, index) to a sample, so each (rank, step) computes its sample alone, with no state and no storage. Every sample occurs exactly once per epoch although no list is ever shuffled (format-preserving permutation; JAX/grain's index_shuffle)."""
import hashlib

FAMILY = "seeds and order"
KIND = "seeds"
INPUTS = {"rank": "data-parallel rank", "step": "number of samples the rank has taken before"}
SETTINGS = {"seed": "7", "n": "samples in the data, 23", "ranks": "4 (need not divide n)"}
NOTES = "Returns the index of the sample. The global index is step * ranks + rank; an epoch may end in the middle of a step. A bijection of 0..n-1 in each epoch; a new order each epoch."


def make(seed):
    return {"rank": seed % 4, "step": seed // 4}


def permute(i, n, key):
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        l, r = i >> half, i & mask
        for k in range(6):
            h = hashlib.blake2b(f"{key}:{k}:{r}".encode(), digest_size=4).digest()
            l, r = r, l ^ (int.from_bytes(h, "big") & mask)
        i = (l << half) | r
        if i < n:                      # walk the cycle back into range
            return i


def right(rank, step, seed=7, n=23, ranks=4):
    epoch, index = divmod(step * ranks + rank, n)
    return permute(index, n, f"{seed}/{epoch}")


if __name__ == "__main__":
    order = [right(g % 4, g // 4) for g in range(23 * 6)]
    epochs = [order[e * 23:(e + 1) * 23] for e in range(6)]
    assert all(sorted(e) == list(range(23)) for e in epochs) and len(set(map(tuple, epochs))) == 6
    print("ok", epochs[0])
