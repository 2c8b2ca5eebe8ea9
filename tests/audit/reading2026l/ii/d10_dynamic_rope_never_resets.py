"""Dynamic RoPE stays scaled after one long sequence. huggingface/transformers#46624, https://github.com/huggingface/transformers/pull/46624, 2026.
The longest length seen was read from max_seq_len_cached but written to another attribute (None_max_seq_len_cached) when there is no layer type. The branch
that restores the original frequencies tests that length and never ran: after one long sequence all short ones were rotated with the scaled frequencies."""
import torch

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"lengths": "lengths of the sequences that pass through the embedding, in this order (list of int)"}
SETTINGS = {"dim": "rotary dimension, 8", "base": "10000", "max_len": "length of pre-training, 32", "factor": "scaling factor, 2", "layer_type": "None: one set of frequencies for all layers"}
NOTES = ("Rotary embedding with dynamic NTK scaling. Returns the inverse frequencies used for each sequence, [number of sequences, dim/2]. A sequence longer than every one since the last reset recomputes the frequencies for "
         "its length n with base' = base*(factor*n/max_len-(factor-1))**(dim/(dim-2)); a sequence of at least max_len that is not longer keeps the current ones; a sequence shorter than max_len always uses the "
         "original, unscaled frequencies (the state goes back to the original after long sequences).")


class _Rope:
    def __init__(self, dim, base, max_len, factor, layer_type, key):
        self.dim, self.base, self.factor, self.layer_type, self.key = dim, base, factor, layer_type, key
        prefix = "" if layer_type is None else f"{layer_type}_"
        self.original_max_seq_len = max_len
        self.original_inv_freq = base ** (-torch.arange(0, dim, 2).double() / dim)
        setattr(self, prefix + "max_seq_len_cached", max_len)
        setattr(self, prefix + "inv_freq", self.original_inv_freq)

    def __call__(self, n):
        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        name = f"{self.layer_type}_max_seq_len_cached" if self.key == "type" else prefix + "max_seq_len_cached"
        cached = getattr(self, prefix + "max_seq_len_cached")
        if n > cached:
            b = self.base * (self.factor * n / self.original_max_seq_len - (self.factor - 1)) ** (self.dim / (self.dim - 2))
            setattr(self, prefix + "inv_freq", b ** (-torch.arange(0, self.dim, 2).double() / self.dim))
            setattr(self, name, n)
        if n < self.original_max_seq_len and cached > self.original_max_seq_len:
            setattr(self, prefix + "inv_freq", self.original_inv_freq)
            setattr(self, name, self.original_max_seq_len)
        return getattr(self, prefix + "inv_freq")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    short = torch.randint(4, 31, (3,), generator=g).tolist()
    return {"lengths": [short[0], 40 + int(torch.randint(0, 30, (1,), generator=g)), short[1], short[2]]}


def broken(lengths, dim=8, base=10000.0, max_len=32, factor=2.0, layer_type=None):
    r = _Rope(dim, base, max_len, factor, layer_type, "type")
    return torch.stack([r(n) for n in lengths])


def right(lengths, dim=8, base=10000.0, max_len=32, factor=2.0, layer_type=None):
    r = _Rope(dim, base, max_len, factor, layer_type, "prefix")
    return torch.stack([r(n) for n in lengths])


if __name__ == "__main__":
    i = make(0)
    print(i, "last inverse frequency per sequence")
    print("broken", broken(**i)[:, -1].tolist()); print("right ", right(**i)[:, -1].tolist())
