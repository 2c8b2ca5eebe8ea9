"""The rows of a step: their number, their lengths, and the forward passes that compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from earnest.config.schema import RunConfig
from earnest.data.dataset import Dataset
from earnest.engines import micro
from earnest.engines.packing import Packer, why_not_by_config
from earnest.errors import EarnestError
from earnest.models.loading import TextPolicy, load_text
from earnest.plan.shape import PassSize, Shape
from earnest.signals.batch import Batch
from earnest.tasks import Environment, PromptStream, Task, get_task, is_environment

LOOKED_AT = 64
"""The number of prompts or rows whose lengths are measured; the plan uses the longest."""
ASSUMED = 512
"""The assumed tokens of a prompt if there is no tokenizer to measure it."""


@dataclass(frozen=True)
class BatchLayout:
    """The largest micro-batch of a rank: its forward passes and its active tokens; ``count`` micro-batches in all."""

    largest: tuple[PassSize, ...]
    tokens: int
    count: int
    packed: bool
    computed: int
    """The positions of all micro-batches of the rank."""


@dataclass(frozen=True)
class Workload:
    """A step has ``groups`` prompts of ``prompt`` tokens with ``group`` completions of ``completion`` tokens each."""

    groups: int
    group: int
    prompt: int
    completion: int
    evaluated: tuple[int, int] = (0, 0)
    """Held-out prompts, and completions of each."""
    samples_here: bool = True
    teacher_bytes: int = 0
    lengths_from: str = ""

    @property
    def rows(self) -> int:
        return self.groups * self.group

    @property
    def row_tokens(self) -> int:
        return self.prompt + self.completion

    def sampled(self, slots: int, ranks: int) -> tuple[int, int]:
        """The largest number of rows that a rank decodes together, in training or evaluation, and of the distinct
        prompts among them. Each rank samples the completions of its own prompts."""
        options = [(-(-groups // ranks), n) for groups, n in ((self.groups, self.group), self.evaluated)]
        prompts, rows = max(((p, p * n) for p, n in options), key=lambda option: option[1])
        return min(rows, slots), min(prompts, slots)

    def layout(self, shape: Shape, config: RunConfig, device: object) -> BatchLayout:
        """Cut the rows of one rank into micro-batches, packed or padded, as the engine does."""
        ranks = config.engine.ranks
        batch = self.batch(-(-self.groups // ranks) if self.groups >= ranks else 1)
        padded = micro.cut(batch, config.micro_tokens)
        parts, packed = padded, False
        small = shape.policy.dtype.itemsize == 2 and getattr(device, "kind", "") == "cpu"
        wanted = config.engine.pack if config.engine.pack is not None or not small else False
        if wanted is not False and why_not_by_config(shape.policy) is None:
            packer = Packer(shape.policy)
            dense = micro.cut_packed(batch, config.micro_tokens, packer, one_block=ranks > 1)
            if wanted or micro.saves(dense, padded, packer):
                parts, packed = dense, True
        sizes = [_passes(part) for part in parts]
        largest = max(range(len(parts)), key=lambda i: sum(p.tokens for p in sizes[i]))
        computed = sum(p.computed for p in parts)
        return BatchLayout(tuple(sizes[largest]), int(parts[largest].token.numel()), len(parts), packed, computed)

    def batch(self, groups: int, vocabulary: int = 2**30) -> Batch:
        """Random rows of these lengths; the rows of a group have the same prompt."""
        g = torch.Generator().manual_seed(0)

        def tokens(n: int) -> list[int]:
            return torch.randint(vocabulary, (n,), generator=g).tolist()

        prompts = [p for p in (tokens(self.prompt) for _ in range(groups)) for _ in range(self.group)]
        return Batch.from_rows(prompts, [tokens(self.completion) for _ in prompts])


def _passes(part: micro.Micro) -> list[PassSize]:
    if part.layout is None:
        return [PassSize(len(part.batch), part.batch.inputs.shape[1])]
    blocks = [(b.inputs.shape, b.mask is not None) for b in part.layout.blocks]
    return [PassSize(shape[0], shape[1], masked) for shape, masked in blocks]


def workload(config: RunConfig, tokens: int | None, say: Callable[[str], None]) -> Workload:
    """The rows of a recipe. ``tokens`` is the length of a row, prompt and completion together; None: it is measured
    with the tokenizer."""
    sampling, wants = config.sampling, config.build_objective().wants()
    rolls = config.task is not None and "rollout" in wants.roles
    made = Workload(
        groups=sampling.prompts_per_step,
        group=sampling.completions_per_prompt if rolls else 2 if "chosen" in wants.roles else 1,
        prompt=1,
        completion=1,
        evaluated=(config.eval.prompts, config.eval.samples) if config.task is not None else (0, 0),
        samples_here=config.task is not None and config.sampler is None and not sampling.workers,
    )
    text = None if tokens is not None else _text(config, say)
    if config.task is None:
        return _with_rows(made, config, tokens, text, say)
    task: Task | Environment = get_task(config.task.name, config.task.fields)
    completion = config.sampling.max_new_tokens * (config.turns.max_turns if is_environment(task) else 1)
    if tokens is not None:
        return replace(
            made, prompt=max(1, tokens - completion), completion=min(completion, tokens - 1), lengths_from="as given"
        )
    if text is None:
        return replace(made, prompt=ASSUMED, completion=completion, lengths_from="assumed: there is no tokenizer")
    longest = max(len(text.render(p.messages)) for p in PromptStream(task, config.seed).next(LOOKED_AT))
    return replace(
        made, prompt=longest, completion=completion, lengths_from=f"the longest of {LOOKED_AT} prompts of {task.name}"
    )


def _text(config: RunConfig, say: Callable[[str], None]) -> TextPolicy | None:
    try:
        text = load_text(config.model, say)
    except EarnestError:
        return None
    if config.chat_template is not None:
        text.tokenizer.chat_template = config.chat_template
    return text


def _with_rows(
    made: Workload, config: RunConfig, tokens: int | None, text: TextPolicy | None, say: Callable[[str], None]
) -> Workload:
    assert config.data is not None, "a run without a task has data"
    if text is None:
        row = tokens or ASSUMED
        where = "as given" if tokens else "assumed: there is no tokenizer"
        return replace(made, prompt=1, completion=max(1, row - 1), lengths_from=where)
    found = Dataset.load(config.data, text, text.positions or 2**31)
    count = min(LOOKED_AT, found.size("train"))
    rows: Sequence[int] = [len(r) for i in range(count) for r in found.rendered(found.at("train", i))]
    say(f"{count} rows of {config.data.train} measured")
    return replace(made, prompt=1, completion=max(rows) - 1, lengths_from=f"the longest of {count} rows")
