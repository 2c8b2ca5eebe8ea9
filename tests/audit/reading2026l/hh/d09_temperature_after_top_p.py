"""Temperature applied after the nucleus filter. fishaudio/fish-speech#1150, https://github.com/fishaudio/fish-speech/pull/1150, 2026.
logits_to_probs() sorted and cut the unscaled distribution at top_p and divided by the temperature only afterwards, so that top_p means another
thing for each temperature (with T < 1 it keeps more tokens than the nucleus of the distribution that is sampled)."""
FAMILY = "samplers"
KIND = "sampler"
INPUTS = {"model": "causal LM, ids [1, time] -> logits [1, time, vocabulary]", "prompt_ids": "token ids [1, prompt length]",
          "settings": "dict, see SETTINGS"}
SETTINGS = {"temperature": "0.6", "top_p": "nucleus mass, 0.8", "max_new_tokens": "12", "seed": "of the sampling generator, 0"}
NOTES = """(model, prompt_ids, settings) -> ids [max_new_tokens], logprobs [max_new_tokens]. Order of the processing: logits / temperature, softmax, nucleus filter on
those tempered probabilities (the smallest set of most likely tokens whose mass reaches top_p; the token which crosses top_p is kept), renormalise,
sample. logprobs[t] is the log-probability of ids[t] under exactly the distribution it was sampled from (tempered, filtered, renormalised), given the
prompt and ids[:t]. No stop token: always max_new_tokens tokens. No gradient."""
import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, v=30, d=16):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0]) * 4


def make(seed):
    torch.manual_seed(seed)
    return {"model": LM(), "prompt_ids": torch.randint(0, 30, (1, 5)), "settings": {"temperature": 0.6, "top_p": 0.8, "max_new_tokens": 12, "seed": 0}}


def _nucleus(logits, top_p):
    s, idx = logits.sort(descending=True)
    cum = s.softmax(-1).cumsum(-1)
    drop = cum - s.softmax(-1) >= top_p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, idx, drop), float("-inf"))


@torch.no_grad()
def _sample(model, prompt_ids, settings, process):
    g = torch.Generator().manual_seed(settings["seed"])
    ids, lps = prompt_ids, []
    for _ in range(settings["max_new_tokens"]):
        lp = process(model(ids)[0, -1]).log_softmax(-1)
        tok = torch.multinomial(lp.exp(), 1, generator=g)
        lps.append(lp[tok])
        ids = torch.cat([ids, tok[None]], 1)
    return ids[0, prompt_ids.shape[1]:], torch.cat(lps)


def broken(model, prompt_ids, settings):
    return _sample(model, prompt_ids, settings, lambda z: _nucleus(z, settings["top_p"]) / settings["temperature"])


def right(model, prompt_ids, settings):
    return _sample(model, prompt_ids, settings, lambda z: _nucleus(z / settings["temperature"], settings["top_p"]))


if __name__ == "__main__":
    x = make(0)
    (a, la), (b, lb) = broken(**x), right(**x)
    print("broken", a.tolist(), la.sum().item())
    print("right ", b.tolist(), lb.sum().item())
    z = x["model"](x["prompt_ids"])[0, -1].detach()
    print("kept at first step: broken", _nucleus(z, .8).isfinite().sum().item(), "right", _nucleus(z / .6, .8).isfinite().sum().item())
    assert not torch.allclose(la, lb)
