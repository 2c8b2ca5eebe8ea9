"""Log-probs in the two shapes that OpenAI has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from earnest.serve.text import Text

if TYPE_CHECKING:
    from earnest.serve.decode import Done


def chat_logprobs(text: Text, done: Done) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}, …]}, one per token, with the token that ends the turn."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text.decode([token], special=True), "logprob": logprob, "bytes": text.bytes_of(token)}

    tops = done.tops or ((),) * len(done.tokens)
    content = [
        {**entry(token, logprob), "top_logprobs": [entry(t, v) for t, v in top]}
        for token, logprob, top in zip(done.tokens, done.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(text: Text, done: Done, echo: dict[str, Any] | None, start: int = 0) -> dict[str, Any]:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}, with those of an echoed prompt first; ``start`` is
    the offset of the first token, if earlier chunks were sent."""
    front = [] if echo is None else list(echo["tokens"])
    values: list[float | None] = [] if echo is None else list(echo["logprobs"])
    said = [text.decode([t], special=True) for t in [*front, *done.tokens]]
    tops: list[dict[str, float] | None] = [None] * len(front)
    tops += [{text.decode([t], special=True): v for t, v in top} for top in done.tops or ((),) * len(done.tokens)]
    offsets, place = [], start
    for word in said:
        offsets.append(place)
        place += len(word)
    return {
        "tokens": said,
        "token_logprobs": [*values, *done.logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
