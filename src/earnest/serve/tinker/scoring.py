"""What a sampler thinks of a prompt: log-probs of its tokens, the top K beside them, given ids, draws.

Row i of the scores is about prompt token i + 1; the first token has nothing before it.
Shapes: P = len(prompt) - 1 scored rows, K ids a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.models.policy import Policy
from earnest.serve.tinker.data import Cells, Top
from earnest.serve.tinker.errors import WireError
from earnest.serve.tinker.wire import dense, row_of

MAX_CELLS = 1 << 24
"""Numbers that one request may ask for: rows × K."""


@dataclass(frozen=True, eq=False)
class Asked:
    """What a request wants to know about its prompt. ``last`` restricts log-probs and top K to the last tokens."""

    logprobs: bool = False
    top: int = 0
    targets: Cells | None = None
    draws: int = 0
    last: int | None = None
    temperature: float = 1.0
    seed: int = 0

    @property
    def anything(self) -> bool:
        return self.logprobs or self.top > 0 or self.targets is not None or self.draws > 0


@dataclass(frozen=True, eq=False)
class Scores:
    prompt: tuple[float | None, ...] | None = None
    top: Top | None = None
    targets: Cells | None = None
    alternatives: tuple[Int[Tensor, "P K"], Float[Tensor, "P K"]] | None = None


def check(asked: Asked, prompt: tuple[int, ...], vocabulary: int) -> None:
    rows = len(prompt) - 1
    if not 0 <= asked.top <= vocabulary:
        raise WireError(f"topk_prompt_logprobs is {asked.top}; give 0 … {vocabulary}.")
    if asked.draws < 0 or max(asked.top, asked.draws) * len(prompt) > MAX_CELLS:
        raise WireError(
            f"topk_prompt_logprobs is {asked.top} and prompt_alt_tokens_k {asked.draws}; give 0 or more, and at most "
            f"{MAX_CELLS} numbers for the whole prompt."
        )
    if asked.anything and rows < 1:
        raise WireError("a prompt of one token has nothing to score: its first token has no context.")
    if asked.last is not None and (not asked.logprobs or not 1 <= asked.last <= rows):
        raise WireError(f"prompt_logprobs_last_n is {asked.last}; it needs prompt_logprobs, and 1 … {rows} here.")
    if asked.targets is not None:
        cells = asked.targets
        if cells.values.is_floating_point() or len(cells.shape) != 2 or cells.shape[0] != rows:
            raise WireError(
                f"target_prompt_logprobs has shape {cells.shape}; it must be integers of shape [{rows}, K], one row "
                "for each prompt token after the first."
            )
        ids = dense(cells, "target_prompt_logprobs", -1) if cells.rows is not None else cells.values
        if ids.numel() != cells.shape[0] * cells.shape[1] or ids.numel() > MAX_CELLS:
            raise WireError(
                f"target_prompt_logprobs: {ids.numel()} values for shape {cells.shape}, at most {MAX_CELLS}."
            )
        if not bool((ids >= 0).any()) or int(ids.max()) >= vocabulary or int(ids.min()) < -1:
            raise WireError(
                f"target_prompt_logprobs: ids must lie in 0…{vocabulary - 1}, -1 for none, and at least one."
            )


@torch.no_grad()
def score(policy: Policy, prompt: tuple[int, ...], asked: Asked) -> Scores:
    """Inside a turn, with the sampler's adapter open."""
    tokens = torch.tensor(prompt, device=policy.device)
    hidden = policy.hidden(tokens[None, :-1])[0]
    logits = policy.head.logits(hidden).float()  # [P, V]: one prompt at a time
    logp = logits.log_softmax(-1)
    rows = logp.shape[0]
    scored = (False, *(asked.last is None or rows - i <= asked.last for i in range(rows)))
    prompt_logprobs: tuple[float | None, ...] | None = None
    if asked.logprobs:
        own = logp.gather(-1, tokens[1:, None])[:, 0].tolist()
        prompt_logprobs = tuple(v if on else None for v, on in zip([0.0, *own], scored, strict=True))
    top = None
    if asked.top:
        values, ids = (torch.nn.functional.pad(t, (0, 0, 1, 0)).cpu() for t in logp.topk(asked.top, -1))
        top = Top(ids, values, scored)
    return Scores(
        prompt_logprobs,
        top,
        None if asked.targets is None else _at(logp, asked.targets),
        _draws(logits, asked) if asked.draws else None,
    )


def _at(logp: Float[Tensor, "P V"], cells: Cells) -> Cells:
    """The log-probs of the named ids, in the layout that they came in; 0 where none was named."""
    ids = cells.values.to(logp.device)
    if cells.rows is None:
        wanted = ids.reshape(cells.shape)
        values = torch.where(wanted >= 0, logp.gather(-1, wanted.clamp(min=0)), 0.0).flatten()
    else:
        values = torch.where(ids >= 0, logp[row_of(cells).to(logp.device), ids.clamp(min=0)], 0.0)
    return Cells(values.cpu(), cells.shape, cells.rows, cells.columns)


def _draws(logits: Float[Tensor, "P V"], asked: Asked) -> tuple[Int[Tensor, "P K"], Float[Tensor, "P K"]]:
    """Independent draws at every position at the request's temperature, with the log-probs they were drawn with."""
    logp = (logits / asked.temperature if asked.temperature else logits).log_softmax(-1).cpu()
    if asked.temperature == 0:
        tokens = logp.argmax(-1, keepdim=True).expand(-1, asked.draws).contiguous()
    else:
        generator = torch.Generator().manual_seed(asked.seed)
        tokens = torch.multinomial(logp.exp(), asked.draws, replacement=True, generator=generator)
    return tokens, logp.gather(-1, tokens)
