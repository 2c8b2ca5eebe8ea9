"""Stateless shuffling with a Feistel permutation and cycle walking. No permutation is stored and no generator is advanced: the sample of (rank, step) is computed, so resuming is free. Consecutive
epochs share one stream, and a step may straddle two epochs; the loop that walks until the value is in range always ends, as the network is a bijection."""
FAMILY = "seeds"
KIND = "seeds"
INPUTS = {"rank": "rank, 0..ranks - 1", "step": "global step over all epochs, from 0"}
SETTINGS = {"size": "items of the data set, 37", "ranks": "number of ranks, 4", "seed": "shuffle seed, 7"}
NOTES = ("Returns the index of one item. Over all ranks and steps in order of step * ranks + rank, every stretch of `size` positions starting at a multiple of size is a permutation. "
         "size needs not be divisible by ranks: nothing is padded or dropped.")
import hashlib


def make(seed):
    return {"rank": seed % 4, "step": seed}


def feistel(x, bits, key):
    half = bits // 2
    low = (1 << half) - 1
    a, b = x >> half, x & low
    for r in range(4):
        h = hashlib.blake2b(b"%d/%d/%d" % (key[0], key[1], (r << 40) | b), digest_size=8).digest()
        a, b = b, a ^ (int.from_bytes(h, "big") & low)
    return (a << half) | b


def right(rank, step, size=37, ranks=4, seed=7):
    epoch, x = divmod(step * ranks + rank, size)
    bits = max(2, (size - 1).bit_length())
    bits += bits % 2
    x = feistel(x, bits, (seed, epoch))
    while x >= size:
        x = feistel(x, bits, (seed, epoch))
    return x


if __name__ == "__main__":
    stream = [right(k % 4, k // 4) for k in range(37 * 6)]
    epochs = [stream[e * 37:(e + 1) * 37] for e in range(6)]
    assert all(sorted(e) == list(range(37)) for e in epochs) and len({tuple(e) for e in epochs}) == 6
    print("epoch 0 begins", epochs[0][:10], "epoch 1 begins", epochs[1][:10])
