"""Log-probs of given tokens: of an answer in a chat, and of the prompt of a Tinker client.

Shapes: P scored tokens, K ids per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.models.policy import Policy
from earnest.serve.errors import BadRequest, TooLong
from earnest.serve.tinker.data import Cells, SampleOutput, Top
from earnest.serve.tinker.errors import WireError
from earnest.serve.tinker.wire import dense, row_of

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.serve.state import State


def _logits(policy: Policy, ids: Int[Tensor, " T"], first: int) -> Float[Tensor, "P V"]:
    """The logits that predict ``ids[first:]``, in float32. Inside a turn."""
    hidden = policy.hidden(ids[None, :-1])[:, first - 1 :]
    return policy.head.logits(hidden).float()[0]


@torch.no_grad()
def score_tokens(state: State, adapter: Adapter | None, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """log π(answer_t | prompt, answer_<t) at temperature 1."""
    policy = state.host.policy
    if (limit := policy.positions) is not None and len(prompt) + len(answer) > limit:
        raise TooLong(f"{len(prompt)} + {len(answer)} tokens are more than the {limit} positions of {policy.name}.")
    ids = torch.as_tensor([*prompt, *answer], device=policy.device)
    with state.host.turn("chat", adapter):
        logprobs = _logits(policy, ids, len(prompt)).log_softmax(-1)
    return logprobs.gather(-1, ids[len(prompt) :, None])[:, 0].tolist()


def prompt_tops(
    state: State, adapter: Adapter | None, top: int, prompt: Sequence[int]
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: for each token after the first, the ``top`` most probable ids and the token itself,
    as {id: {logprob, rank, decoded_token}} at temperature 1."""
    policy = state.host.policy
    vocabulary = policy.head.weight.shape[0]
    if max(prompt) >= vocabulary or len(prompt) * (top + 1) > MAX_CELLS >> 4:
        raise BadRequest(
            f"prompt_logprobs {top} of {len(prompt)} tokens: ids must be below {vocabulary}, and tokens × "
            f"(prompt_logprobs + 1) at most {MAX_CELLS >> 4}.",
            "prompt_logprobs",
        )
    if (limit := policy.positions) is not None and len(prompt) > limit:
        raise TooLong(f"{len(prompt)} tokens are more than the {limit} positions of {policy.name}.")
    if len(prompt) == 1:
        return [None]
    ids = torch.as_tensor(prompt, device=policy.device)
    with state.host.turn("chat", adapter):
        logp = _logits(policy, ids, 1).log_softmax(-1)
    own = logp.gather(-1, ids[1:, None])
    ranks = ((logp > own).sum(-1) + 1).tolist()
    best = logp.topk(min(top, vocabulary), -1)
    found: list[dict[str, dict[str, Any]] | None] = [None]
    rows = zip(best.indices.tolist(), best.values.tolist(), prompt[1:], own[:, 0].tolist(), ranks, strict=True)
    for tokens, values, token, value, rank in rows:
        places = [*zip(tokens, values, range(1, top + 1), strict=False), (token, value, rank)]
        found.append(
            {str(t): {"logprob": v, "rank": r, "decoded_token": state.text.decode([t], special=True)}
             for t, v, r in places}
        )  # fmt: skip
    return found


def answer_tokens(
    state: State,
    messages: Sequence[Mapping[str, Any]],
    answer: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt, the answer and the token that ends its turn), as the chat template writes them."""
    prompt = state.text.render(messages, tools=tools)
    whole = state.text.render([*messages, {"role": "assistant", "content": answer}], answer=False, tools=tools)
    if whole[: len(prompt)] != prompt:
        raise BadRequest(f"the chat template of {state.host.policy.name} writes a prompt differently before an answer.")
    tokens = whole[len(prompt) :]
    ends = [i for i, token in enumerate(tokens) if token in state.host.policy.eos_ids]
    return prompt, tokens[: ends[-1] + 1] if ends else tokens


def score_answer(
    state: State, adapter: Adapter | None, messages: Sequence[Mapping[str, Any]], answer: str
) -> dict[str, Any]:
    """The body of /v1/score."""
    prompt, tokens = answer_tokens(state, messages, answer)
    values = score_tokens(state, adapter, prompt, tokens)
    return {
        "tokens": [state.text.decode([t], special=True) for t in tokens],
        "token_ids": list(tokens),
        "logprobs": values,
        "logprob_sum": sum(values),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
    }


MAX_CELLS = 1 << 24
"""The largest number of scores per request: rows × K."""


@dataclass(frozen=True, eq=False)
class PromptQuery:
    """The scores that a Tinker request needs of its prompt; ``last`` restricts log-probs and top K to the last
    tokens."""

    logprobs: bool = False
    top: int = 0
    targets: Cells | None = None
    draws: int = 0
    last: int | None = None
    temperature: float = 1.0
    seed: int = 0

    @property
    def any(self) -> bool:
        return self.logprobs or self.top > 0 or self.targets is not None or self.draws > 0


def check_query(asked: PromptQuery, prompt: tuple[int, ...], vocabulary: int) -> None:
    """Refuse scores that this prompt cannot have."""
    rows = len(prompt) - 1
    if not 0 <= asked.top <= vocabulary:
        raise WireError(f"topk_prompt_logprobs is {asked.top}; give 0 … {vocabulary}.")
    if asked.draws < 0 or max(asked.top, asked.draws) * len(prompt) > MAX_CELLS:
        raise WireError(
            f"topk_prompt_logprobs is {asked.top} and prompt_alt_tokens_k {asked.draws}; give 0 or more, and at most "
            f"{MAX_CELLS} numbers for the whole prompt."
        )
    if asked.any and rows < 1:
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
        ids = cells.values if cells.rows is None else dense(cells, "target_prompt_logprobs", -1)
        if ids.numel() != cells.shape[0] * cells.shape[1] or ids.numel() > MAX_CELLS:
            raise WireError(
                f"target_prompt_logprobs: {ids.numel()} values for shape {cells.shape}, at most {MAX_CELLS}."
            )
        if not bool((ids >= 0).any()) or int(ids.max()) >= vocabulary or int(ids.min()) < -1:
            raise WireError(
                f"target_prompt_logprobs: ids must lie in 0…{vocabulary - 1}, -1 for none, and at least one."
            )


@torch.no_grad()
def score_prompt(policy: Policy, prompt: tuple[int, ...], asked: PromptQuery) -> SampleOutput:
    """The scores without any sequence; inside a turn, with the sampler's adapter active."""
    tokens = torch.tensor(prompt, device=policy.device)
    logits = _logits(policy, tokens, 1)
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
    return SampleOutput(
        (),
        prompt_logprobs,
        top,
        None if asked.targets is None else _at(logp, asked.targets),
        _draws(logits, asked) if asked.draws else None,
    )


def _at(logp: Float[Tensor, "P V"], cells: Cells) -> Cells:
    """The log-probs of the named ids, in the same layout; 0 where no id was named."""
    ids = cells.values.to(logp.device)
    if cells.rows is None:
        wanted = ids.reshape(cells.shape)
        values = torch.where(wanted >= 0, logp.gather(-1, wanted.clamp(min=0)), 0.0).flatten()
    else:
        values = torch.where(ids >= 0, logp[row_of(cells).to(logp.device), ids.clamp(min=0)], 0.0)
    return Cells(values.cpu(), cells.shape, cells.rows, cells.columns)


def _draws(logits: Float[Tensor, "P V"], asked: PromptQuery) -> tuple[Int[Tensor, "P K"], Float[Tensor, "P K"]]:
    """Independent draws at every position at the request's temperature, with the log-probs they were drawn with."""
    logp = (logits / asked.temperature if asked.temperature else logits).log_softmax(-1).cpu()
    if asked.temperature == 0:
        tokens = logp.argmax(-1, keepdim=True).expand(-1, asked.draws).contiguous()
    else:
        generator = torch.Generator().manual_seed(asked.seed)
        tokens = torch.multinomial(logp.exp(), asked.draws, replacement=True, generator=generator)
    return tokens, logp.gather(-1, tokens)
