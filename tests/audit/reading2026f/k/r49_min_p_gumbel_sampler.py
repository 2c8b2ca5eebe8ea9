"""Min-p sampling by the Gumbel-max trick, with the log-probabilities of the distribution that was really sampled from (vLLM processed_logprobs). Noise is added and argmax
taken (no multinomial); the reported log-probability is after temperature and truncation, so it is above the model's own, and 0 where one token is left."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "ids [rows, time] -> logits", "prompt_ids": "[rows, time], all of equal length", "settings": "temperature 0.8; min_p 0.1 (threshold relative to the most probable token); max_new 6; eos 1; pad 0; seed"}
SETTINGS = {"temperature": "0.8", "min_p": "0.1, applied after the temperature", "max_new": "6", "eos": "1", "pad": "0", "seed": "0"}
NOTES = "Returns new ids [rows, max_new] and log-probabilities; after the end token ids are pad and log-probabilities 0 (the end token itself has its log-probability). Noise only; no gradient. Own generator, the global one is not touched."


class TinyLM(nn.Module):
    def __init__(self, vocab=12, width=12):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, ids):
        return 4 * self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    torch.manual_seed(seed)
    return {"model": TinyLM(), "prompt_ids": torch.randint(2, 12, (3, 4)), "settings": {"temperature": 0.8, "min_p": 0.1, "max_new": 6, "eos": 1, "pad": 0, "seed": seed}}


@torch.no_grad()
def right(model, prompt_ids, settings):
    g = torch.Generator().manual_seed(settings["seed"])
    ids, done, out = prompt_ids, torch.zeros(len(prompt_ids), dtype=torch.bool), []
    for _ in range(settings["max_new"]):
        logp = F.log_softmax(model(ids)[:, -1].float() / settings["temperature"], -1)
        threshold = logp.max(-1, keepdim=True).values + torch.log(torch.tensor(settings["min_p"]))
        logp = F.log_softmax(logp.masked_fill(logp < threshold, float("-inf")), -1)
        noise = -torch.log(-torch.log(torch.rand(logp.shape, generator=g).clamp(1e-9, 1 - 1e-7)))
        token = (logp + noise).argmax(-1)
        chosen = logp.gather(-1, token[:, None]).squeeze(-1)
        token, chosen = token.masked_fill(done, settings["pad"]), chosen.masked_fill(done, 0.0)
        out.append(chosen); ids = torch.cat([ids, token[:, None]], 1); done |= token == settings["eos"]
    return ids[:, prompt_ids.shape[1]:], torch.stack(out, 1)


if __name__ == "__main__":
    d = make(0); new, lp = right(**d); print(new, lp, sep="\n")
    one = d["prompt_ids"][:1].repeat(20000, 1)                       # frequencies against exp(reported)
    t, l = right(d["model"], one, {**d["settings"], "max_new": 1})
    p = torch.softmax(d["model"](one[:1])[0, -1] / 0.8, 0).detach(); p = p * (p >= 0.1 * p.max()); p = p / p.sum()
    freq = torch.bincount(t[:, 0], minlength=12) / 20000
    print(freq, p, sep="\n"); assert (freq - p).abs().max() < 0.015 and torch.allclose(l.exp()[:, 0], p[t[:, 0]], atol=1e-5)
    for row, k in zip(new.tolist(), lp.tolist()):
        if 1 in row:
            assert all(x == 0 for x in row[row.index(1) + 1:]) and all(x == 0 for x in k[row.index(1) + 1:])
