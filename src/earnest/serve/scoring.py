"""Log-probs of given tokens, inside a chat's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from earnest.serve.errors import BadRequest, TooLong

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.serve.state import State


@torch.no_grad()
def score_tokens(state: State, adapter: Adapter | None, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """log π(answer_t | prompt, answer_<t) at temperature 1."""
    from earnest.serve.decode import positions

    policy = state.host.policy
    limit = positions(policy)
    if limit is not None and len(prompt) + len(answer) - 1 > limit:
        raise TooLong(f"{len(prompt)} + {len(answer)} tokens are more than the {limit} that {policy.name} looks at.")
    ids = torch.as_tensor([[*prompt, *answer]], device=policy.device)
    with state.host.turn("chat", adapter):
        hidden = policy.hidden(ids[:, :-1])[:, len(prompt) - 1 :]
        logprobs = policy.head.logits(hidden).float().log_softmax(-1)
    return logprobs[0].gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


def answer_tokens(
    state: State, messages: Sequence[Mapping[str, Any]], answer: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt, the answer and the token that ends its turn), as the chat template writes them."""
    prompt = state.text.render(messages)
    whole = state.text.render([*messages, {"role": "assistant", "content": answer}], answer=False)
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
