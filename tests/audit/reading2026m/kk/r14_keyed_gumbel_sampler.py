"""Batch-invariant sampling with keyed Gumbel noise (SGLang deterministic inference, vLLM per-request seeds). Takes an argmax and draws nothing from a global generator, yet samples exactly from the softmax; a generator is made anew for each row and step on purpose,
and two rows with the same seed and prompt come out the same."""
import torch
import torch.nn as nn

FAMILY = "samplers"
KIND = "sampler"
INPUTS = {
    "model": "causal language model, ids [rows, time] -> logits [rows, time, vocabulary]",
    "prompt_ids": "prompts of the same length, [rows, time]",
    "settings": "dict with temperature 0.8, max_new 10, and seeds: one int per row",
}
SETTINGS = {}
NOTES = (
    "Gumbel-max sampling. In step t row r takes argmax(logits/temperature + noise), noise = Gumbel(0,1) per token of the vocabulary from a generator seeded by (seeds[r], t) alone; the token is an exact sample of softmax(logits/temperature). A row's tokens depend on its own seed, prompt and step, not on the other rows or their order; same seed and same prompt give the same answer, "
    "so the caller gives each row its own seed. Returns (ids of the new tokens [rows, max_new], log-probability of each under softmax(logits/temperature) [rows, max_new]). No truncation, no stop token, no gradient."
)


class Tiny(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return 4 * self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": Tiny(), "prompt_ids": torch.randint(0, 23, (5, 4), generator=g),
            "settings": {"temperature": 0.8, "max_new": 10, "seeds": [1000 * seed + r for r in range(5)]}}


def _gumbel(seed, step, size):
    g = torch.Generator().manual_seed((seed * 1_000_003 + step * 7_919 + 12_345) % (2 ** 63))
    return -torch.log(-torch.log(torch.rand(size, generator=g, dtype=torch.float64).clamp(1e-300, 1 - 1e-16)))


@torch.no_grad()
def right(model, prompt_ids, settings):
    ids, new, lps = prompt_ids, [], []
    for t in range(settings["max_new"]):
        z = model(ids)[:, -1].double() / settings["temperature"]
        noise = torch.stack([_gumbel(s, t, z.shape[-1]) for s in settings["seeds"]])
        tok = (z + noise).argmax(-1, keepdim=True)
        lps.append(z.log_softmax(-1).gather(-1, tok).float())
        new.append(tok)
        ids = torch.cat([ids, tok], 1)
    return torch.cat(new, 1), torch.cat(lps, 1)


if __name__ == "__main__":
    for s in range(2):
        d = make(s)
        ids, lp = right(**d)
        for r in range(5):
            one, _ = right(d["model"], d["prompt_ids"][r:r + 1], {**d["settings"], "seeds": [d["settings"]["seeds"][r]]})
            assert torch.equal(one[0], ids[r])
        full = torch.cat([d["prompt_ids"], ids], 1)
        again = (d["model"](full)[:, 3:-1] / 0.8).log_softmax(-1).gather(-1, full[:, 4:, None])[..., 0]
        assert torch.allclose(again, lp, atol=1e-4)
        print("seed", s, "row 0", ids[0].tolist(), "logprob difference %.1e" % (again - lp).detach().abs().max())
    d, n = make(0), 6000
    ids, _ = right(d["model"], d["prompt_ids"][:1].expand(n, -1), {"temperature": 0.8, "max_new": 1, "seeds": list(range(n))})
    p = (d["model"](d["prompt_ids"][:1])[0, -1] / 0.8).softmax(-1)
    freq = torch.bincount(ids[:, 0], minlength=23) / n
    print("total variation between frequencies and softmax %.4f" % (0.5 * (freq - p).abs().sum().item()))
    assert 0.5 * (freq - p).abs().sum() < 0.03
