"""Tokens per second of `earnest.models.sample` and of transformers' ``generate``, same model, same prompts, in one run.

    python benchmarks/sampling.py [--threads 1] [--repeats 5]

Random Llamas of 1.3 M and 3.0 M parameters on a CPU. In "full" there is no end-of-turn token, so completions have the
full length; in "ending" a completion ends with probability 5 % at every token, so that dropping finished rows matters.
Only the completions' tokens are counted, and both sides return the behaviour log-probs. The two sides alternate. CPU
seconds of the process are compared, because other jobs on the machine affect them less than the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from earnest.models import Policy, SampleSpec, sample

SIZES = {
    "1.3M": {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "vocab_size": 1024},
    "3.0M": {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "vocab_size": 2048},
}


def make(size: str, ending: bool) -> Policy:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(0)
    eos = 1 if ending else None
    common = {"num_hidden_layers": 6, "max_position_embeddings": 512, "tie_word_embeddings": True}
    config = LlamaConfig(**SIZES[size], **common, pad_token_id=0, eos_token_id=eos, bos_token_id=None)
    model = LlamaForCausalLM(config)
    vocab = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab, "t0")), eos_token="t1" if ending else None, pad_token="t0"
    )
    if ending:  # about 5 % for the end at every token, whatever came before
        head = torch.nn.Linear(config.hidden_size, config.vocab_size)
        with torch.no_grad():
            head.weight.copy_(model.lm_head.weight)
            head.bias.zero_()
            head.bias[1] = float(torch.tensor(0.05 * config.vocab_size).log())
        model.lm_head = head
    return Policy.of(model, tokenizer)


def ours(policy: Policy, prompts: list[list[int]], n: int, new: int) -> int:
    return sum(len(c.tokens) for c in sample(policy, prompts, n, SampleSpec(max_new_tokens=new)))


def theirs(policy: Policy, prompts: list[list[int]], n: int, new: int) -> int:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = policy.model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        max_new_tokens=new,
        num_return_sequences=n,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[:, longest:]
    torch.stack(out.logits, 1).log_softmax(-1).gather(-1, tokens[..., None])  # behaviour log-probs are part of the job
    ended = (tokens == 1).cumsum(1) - (tokens == 1).long() if policy.eos_ids else torch.zeros_like(tokens)
    return int((ended == 0).sum())


def speeds(sides: list[Callable[[], int]], repeats: int) -> list[float]:
    """Tokens per CPU second of each side, best of ``repeats``, taken in turns."""
    best = [0.0 for _ in sides]
    for turn in range(repeats + 1):  # turn 0 warms up
        for i, side in enumerate(sides):
            start = time.process_time()
            speed = side() / (time.process_time() - start)
            best[i] = max(best[i], speed) if turn else 0.0
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    rows = []
    for size in SIZES:
        for ending in (False, True):
            policy = make(size, ending)
            for ragged in (False, True):
                for prompts_count, n in ((4, 8), (8, 8)):
                    generator = torch.Generator().manual_seed(0)
                    prompts = [
                        torch.randint(2, 1000, (20 + (3 * i if ragged else 0),), generator=generator).tolist()
                        for i in range(prompts_count)
                    ]
                    a, b = speeds(
                        [partial(side, policy, prompts, n, 32) for side in (ours, theirs)], repeats=args.repeats
                    )
                    case = f"{'ending' if ending else 'full'}{' ragged' if ragged else ''}"
                    rows.append(
                        {
                            "model": size,
                            "rows": len(prompts) * n,
                            "case": case,
                            "earnest": a,
                            "generate": b,
                            "ratio": a / b,
                        }
                    )
                    print(
                        f"{size} {len(prompts) * n:3d} rows  {case:13s}  earnest {a:6.0f}  generate {b:6.0f} "
                        f"tokens per CPU second  ratio {a / b:.2f}"
                    )
    print(json.dumps({"threads": args.threads, "torch": torch.__version__, "results": rows}))


if __name__ == "__main__":
    main()
