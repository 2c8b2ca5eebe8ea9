"""Scores of a nano folder: sampled accuracies, the gap between told and untold, styles, holes, plain text, probes.

    python -m scripts.nano.score [FOLDER] [--prompts 200] [--samples 4] [--seeds 0 1 2] [--json FILE]

Everything is sampled at temperature 1 on held-out prompts, each seed with prompts and samples of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from earnest import data
from earnest.tasks.base import Prompt
from earnest.tasks.holes import HOLES
from earnest.tasks.puzzles import PUZZLES, Puzzle
from earnest.tasks.style import AXES, STYLES, trait

from . import answers
from .corpus import PLACEBOS
from .train import FOLDER

Messages = Sequence[Any]
Scores = dict[str, float]


class Nano:
    """A model folder with what scoring needs: sample texts, and log-probabilities."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def ids(self, messages: Messages) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Messages], n: int = 1, max_new: int = 24) -> list[list[str]]:
        """``n`` completions at temperature 1 for each prompt; prompts of equal length share a batch."""
        by_length: dict[int, list[int]] = defaultdict(list)
        encoded = [self.ids(p) for p in prompts]
        for i, ids in enumerate(encoded):
            by_length[len(ids)].append(i)
        out: list[list[str]] = [[] for _ in prompts]
        for rows in by_length.values():
            batch = torch.tensor([encoded[i] for i in rows]).repeat_interleave(n, 0)
            tokens = self.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new,
            )
            texts = self.tokenizer.batch_decode(tokens[:, batch.shape[1] :], skip_special_tokens=True)
            for j, i in enumerate(rows):
                out[i] = texts[j * n : (j + 1) * n]
        return out

    @torch.inference_mode()
    def nll(self, ids: list[int]) -> list[float]:
        """−log p of every token but the first."""
        x = torch.tensor([ids])
        logp = self.model(x).logits[0, :-1].log_softmax(-1)
        return (-logp.gather(1, x[0, 1:, None])[:, 0]).tolist()

    @torch.inference_mode()
    def next_token(self, messages: Messages) -> torch.Tensor:
        return self.model(torch.tensor([self.ids(messages)])).logits[0, -1].softmax(-1)


def _accuracy(nano: Nano, puzzle: Puzzle, prompts: Sequence[Prompt], shown: Sequence[Messages], n: int) -> float:
    texts = nano.sample(shown, n, max_new=12)
    return statistics.fmean(puzzle.grade(p, t).correct for p, group in zip(prompts, texts, strict=True) for t in group)


def puzzle_scores(nano: Nano, puzzle: Puzzle, count: int, n: int, seed: int) -> Scores:
    """Accuracy untold, and told in each way. The feedback is on a wrong attempt of the model itself."""
    prompts = puzzle.prompts("heldout", count, seed)
    plain = [p.messages for p in prompts]
    attempts = nano.sample(plain, 8, max_new=12)
    wrong = [
        (p, puzzle.grade(p, bad))
        for p, group in zip(prompts, attempts, strict=True)
        if (bad := next((t for t in group if not puzzle.grade(p, t).correct), None)) is not None
    ]
    out = {
        "untold": statistics.fmean(
            puzzle.grade(p, t).correct for p, group in zip(prompts, attempts, strict=True) for t in group
        )
    }
    missed = [p for p, _ in wrong]
    ways: dict[str, Callable[[Prompt, Any], Messages]] = {
        "solution": lambda p, g: data.reprompt(p.messages, p.data["answer"], None),
        "hint": lambda p, g: data.reprompt(p.messages, None, g.feedback),
        "reveal": lambda p, g: data.reprompt(p.messages, None, g.extras["reveal"]),
        "solution+hint": lambda p, g: data.reprompt(p.messages, p.data["answer"], g.feedback),
        "hindsight": lambda p, g: data.hindsight(p.messages, f"No, it is {p.data['answer']}."),
        "placebo": lambda p, g: data.reprompt(p.messages, None, PLACEBOS[0]),
    }
    # The same prompts untold: those that it gets wrong at least once are the harder ones.
    out["untold, same prompts"] = _accuracy(nano, puzzle, missed, [p.messages for p in missed], n)
    for way, show in ways.items():
        out[way] = _accuracy(nano, puzzle, missed, [show(p, g) for p, g in wrong], n)
    return out


def style_scores(nano: Nano, count: int, n: int, seed: int) -> Scores:
    """The trait score under each pole's system prompt, and under its words in hindsight, against no prompt at all."""
    out: Scores = {}
    for task in STYLES:
        prompts = task.prompts("heldout", count, seed)

        def score(shown: Sequence[Messages], axis: str = task.axis) -> float:
            return statistics.fmean(trait(axis, t) for group in nano.sample(shown, n, max_new=64) for t in group)

        out[f"{task.axis}: default"] = score([p.messages for p in prompts])
        for side in ("low", "high"):
            pole = AXES[task.axis][side]
            out[f"{task.axis}: {pole['name']}"] = score(
                [[{"role": "system", "content": pole["system"][0]}, *p.messages] for p in prompts]
            )
            out[f"{task.axis}: {pole['name']} in hindsight"] = score(
                [data.hindsight(p.messages, pole["said"][0]) for p in prompts]
            )
    return out


def hole_scores(nano: Nano, count: int, n: int, seed: int) -> Scores:
    out: Scores = {}
    for task in HOLES:
        prompts = task.prompts("heldout", count, seed)
        grades = [
            task.grade(p, t)
            for p, group in zip(prompts, nano.sample([p.messages for p in prompts], n, max_new=12), strict=True)
            for t in group
        ]
        for key in ("correct", "exploited"):
            out[f"{task.name}: {key}"] = statistics.fmean(bool(g.extras[key]) for g in grades)
        if task.name == "holes":
            for kind in ("sort", "sum"):
                out[f"holes: correct, {kind} only"] = statistics.fmean(
                    g.correct for g in grades if g.extras["kind"] == kind
                )
    return out


def text_scores(nano: Nano) -> Scores:
    """Perplexity of held-out plain text, and the mass on allowed and on right answers of the probes."""
    nlls = [
        x
        for line in data.plain_heldout()
        for x in nano.nll(nano.tokenizer.encode(line + nano.tokenizer.eos_token, add_special_tokens=False))
    ]
    allowed, right = [], []
    for probe in data.probes():
        p = nano.next_token([{"role": "user", "content": probe["prompt"]}])
        mass = {a: p[nano.tokenizer.encode(a, add_special_tokens=False)[0]].item() for a in probe["allowed"]}
        allowed.append(sum(mass.values()))
        right.append(mass[probe["answer"]])
    perplexity = float(torch.tensor(nlls).mean().exp())
    return {
        "plain perplexity": perplexity,
        "probes: mass on allowed": statistics.fmean(allowed),
        "probes: mass on right": statistics.fmean(right),
    }


def tool_scores(nano: Nano, count: int, seed: int) -> Scores:
    """Share of greedy-free first calls and answers that equal the text's."""
    from earnest.tasks.split import stable_rng

    rng = stable_rng("tool scores", seed)
    talks = [answers.tool_talk(rng) for _ in range(count)]
    calls = nano.sample([t[:1] for t in talks], 1, max_new=48)
    replies = nano.sample([t[:3] for t in talks], 1, max_new=32)
    good_calls = [t[1]["tool_calls"][0]["function"]["arguments"] in c[0] for t, c in zip(talks, calls, strict=True)]
    return {
        "tool: right call": statistics.fmean(good_calls),
        "tool: right answer": statistics.fmean(r[0] == t[3]["content"] for t, r in zip(talks, replies, strict=True)),
    }


def scores(folder: Path, prompts: int, samples: int, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Every score, one value a seed."""
    nano = Nano(folder)
    table: dict[str, list[float]] = defaultdict(list)

    def add(found: Scores, prefix: str = "") -> None:
        for key, value in found.items():
            table[prefix + key].append(value)

    for seed in seeds:
        torch.manual_seed(seed)
        for puzzle in track(PUZZLES, description=f"seed {seed}: puzzles"):
            add(puzzle_scores(nano, puzzle, prompts, samples, seed), f"{puzzle.name}: ")
        add(style_scores(nano, min(prompts, 50), samples, seed))
        add(hole_scores(nano, prompts, samples, seed))
        add(tool_scores(nano, prompts, seed))
    add(text_scores(nano))
    return dict(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = scores(options.folder, options.prompts, options.samples, options.seeds)
    console = Console()
    for name, values in found.items():
        console.print(
            f"{name:42s} {statistics.fmean(values):.3f}   {' '.join(f'{v:.3f}' for v in values)}", highlight=False
        )
    if options.json:
        parameters = sum(p.numel() for p in Nano(options.folder).model.parameters())
        record = {
            "prompts": options.prompts,
            "samples": options.samples,
            "seeds": options.seeds,
            "parameters": parameters,
        }
        rounded = {name: [round(v, 4) for v in values] for name, values in found.items()}
        options.json.write_text(json.dumps({**record, "scores": rounded}, indent=2) + "\n")


if __name__ == "__main__":
    main()
