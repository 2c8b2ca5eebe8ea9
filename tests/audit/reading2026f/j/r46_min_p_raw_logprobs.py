"""Min-p sampler that reports the logprobs of the UNTRUNCATED, untempered model, although tokens are drawn from the truncated, tempered one: policy-gradient code that recomputes with plain softmax needs them (vLLM logprobs_mode='raw_logprobs', the default). Temperature comes after min-p here, as in Nguyen et al. 2024."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))

FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"prompt": "token ids, [rows, time], all the same length"}
SETTINGS = {"new": "new tokens, 6", "min_p": "0.3 of the largest probability", "temperature": "1.5", "eos": "token 0; after it a row yields pad 0 with logprob 0", "seed": "0"}
NOTES = "Returns new ids [rows, new] and raw logprobs [rows, new]. Each row has its own generator, so rows do not influence each other. No gradient. The logprobs do not match the sampling distribution on purpose."


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(), "prompt": torch.randint(1, 31, (4, 5))}


@torch.no_grad()
def right(model, prompt, new=6, min_p=0.3, temperature=1.5, eos=0, seed=0):
    gens = [torch.Generator().manual_seed(seed * 100003 + i) for i in range(len(prompt))]
    ids, done = prompt, torch.zeros(len(prompt), dtype=torch.bool)
    out, lps = [], []
    for _ in range(new):
        raw = model(ids)[:, -1].log_softmax(-1)
        keep = raw >= raw.max(-1, keepdim=True).values + torch.tensor(min_p).log()
        p = (raw / temperature).masked_fill(~keep, -torch.inf).softmax(-1)
        tok = torch.stack([torch.multinomial(p[i], 1, generator=g)[0] for i, g in enumerate(gens)])
        tok = torch.where(done, eos, tok)
        lps.append(raw.gather(1, tok[:, None])[:, 0].masked_fill(done, 0.0))
        out.append(tok)
        done = done | (tok == eos)
        ids = torch.cat([ids, tok[:, None]], 1)
    return torch.stack(out, 1), torch.stack(lps, 1)


if __name__ == "__main__":
    d = make(0)
    ids, lp = right(**d)
    full = torch.cat([d["prompt"], ids], 1)
    ref = d["model"](full).log_softmax(-1).detach()
    for i in range(4):
        ended = False
        for t in range(6):
            row = ref[i, 4 + t]
            if ended:
                assert lp[i, t] == 0
                continue
            assert abs(float(lp[i, t] - row[ids[i, t]])) < 1e-5
            assert float(row[ids[i, t]].exp()) >= 0.3 * float(row.exp().max()) - 1e-6
            ended = int(ids[i, t]) == 0
    one, _ = right(d["model"], d["prompt"][:1])
    assert torch.equal(one[0], ids[0])
    print("ok", ids[0].tolist(), lp[0].tolist())
