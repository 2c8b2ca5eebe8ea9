"""The laws of single requests: tokens, log-probs, settings, ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from earnest.errors import SamplingError
from earnest.sync import behaviour
from earnest.sync.contract.session import AuditedRequest, SamplerAudit, values
from earnest.sync.server import Choice, RequestRefused
from earnest_audit.verdict import Finding

SURPRISE = 5.0
"""Standard deviations; a right sampler is farther off in one audit of a million."""
HOT = 1.5
"""A temperature at which draws differ."""
NUCLEUS = 0.8
"""Draws outside the most probable tokens of this mass are counted."""


def token_ids(session: SamplerAudit) -> Iterator[Finding]:
    law, expected = "token ids", "the tokens of prompt and completion"
    try:
        found = [(p, c) for p in session.prompts for c in session.ask(AuditedRequest(None, p, session.spec()), 2)]
    except RequestRefused:
        raise
    except SamplingError as error:
        yield session.finding(law, "not given", expected, False, str(error))
        return
    strange = [c for _, c in found if session.policy.decode(list(c.tokens)).strip() != c.text.strip()]
    meaning = ""
    if strange:
        decoded = session.policy.decode(list(strange[0].tokens))
        meaning = (
            f"The text of a completion is {strange[0].text!r}, and its tokens are {decoded!r} with the policy's "
            "tokenizer: the server has another one. Give it the tokenizer of the policy."
        )
    yield session.finding(law, f"{len(strange)} of {len(found)} differ from their text", "none", not strange, meaning)


def log_probs(session: SamplerAudit) -> Iterator[Finding]:
    asked = [AuditedRequest(None, p, session.spec()) for p in session.prompts]
    found = [session.ask(r, 2) for r in asked]
    raw = session.own([replace(r, spec=session.spec(temperature=1.0)) for r in asked], found)
    yield session.judged("log-probs", asked, found, {behaviour.RAW: raw})


def draws(session: SamplerAudit) -> Iterator[Finding]:
    """First tokens of many completions: how many lie outside the nucleus."""
    spec = session.spec(temperature=HOT, max_new_tokens=1)
    outside, expected, variance, total = 0, 0.0, 0.0, 0
    for place, prompt in enumerate(session.prompts):
        p = (session.logits(None, prompt)[-1] / HOT).softmax(-1)
        ordered, index = p.sort(descending=True)
        tail = set(index[(ordered.cumsum(-1) - ordered) >= NUCLEUS].tolist())
        mass = float(p[list(tail)].sum())
        for part in range(2):
            found = session.ask(AuditedRequest(None, prompt, replace(spec, seed=100 * place + part)), 16)
            outside += sum(c.tokens[0] in tail for c in found)
            expected, variance, total = expected + 16 * mass, variance + 16 * mass * (1 - mass), total + 16
    measured, wanted = (
        f"{outside} of {total} outside the top {NUCLEUS:.0%}",
        f"{expected:.0f} ± {math.sqrt(variance):.0f}",
    )
    if variance < 4.0:
        yield Finding(
            "draws", session.subject, measured, wanted, "not applicable", "The policy is nearly certain here."
        )
        return
    off = (outside - expected) / math.sqrt(variance)
    meaning = (
        "Improbable tokens are not sampled as often as their probabilities: a top-p, top-k or min-p that was not "
        "requested, or another temperature."
    )
    yield session.finding("draws", measured, wanted, abs(off) <= SURPRISE, meaning)


def _truncated(law: str, min_p: float = 0.0, **settings: float) -> Callable[[SamplerAudit], Iterator[Finding]]:
    def check(session: SamplerAudit) -> Iterator[Finding]:
        spec = session.spec(temperature=HOT, **settings)
        asked = [AuditedRequest(None, p, spec, min_p) for p in session.prompts]
        try:
            found = [session.ask(r, 2) for r in asked]
        except RequestRefused as error:
            yield session.refused(law, error)
            return
        meaning = (
            f"Log-probs of tokens sampled with {law} are not those of the renormalised distribution, so a ratio to "
            "them is biased; train with the whole distribution, or on a server that renormalises."
        )
        yield session.judged(law, asked, found, sentence=meaning)

    return check


def seeds(session: SamplerAudit) -> Iterator[Finding]:
    spec = session.spec(temperature=HOT, max_new_tokens=12)
    first, second, other = (
        [c.tokens for p in session.prompts for c in session.ask(AuditedRequest(None, p, replace(spec, seed=seed)))]
        for seed in (3, 3, 4)
    )
    yield session.finding(
        "seeds", f"same seed: {'the same' if first == second else 'other'} tokens; "
        f"other seed: {'the same' if first == other else 'other'} tokens",
        "the same, others", first == second and first != other,
        "Completions do not depend on the seed of the request; a run cannot be repeated, or every step draws the same.",
    )  # fmt: skip


def end_tokens(session: SamplerAudit) -> Iterator[Finding]:
    law, expected, ends = "end tokens", "all at the policy's end of turn, or at max_tokens", session.ends
    long = [
        c for p in session.prompts for c in session.ask(AuditedRequest(None, p, session.spec(max_new_tokens=48)), 2)
    ]
    short = [c for p in session.prompts for c in session.ask(AuditedRequest(None, p, session.spec(max_new_tokens=2)))]

    def wrong(choice: Choice, limit: int) -> bool:
        stopped = choice.finish == "stop"
        inside = any(t in ends for t in choice.tokens[:-1])
        last = bool(choice.tokens) and choice.tokens[-1] in ends
        return inside or stopped != last or (not stopped and len(choice.tokens) != limit)

    bad = [c for c in long if wrong(c, 48)] + [c for c in short if wrong(c, 2)]
    stopped = sum(c.finish == "stop" for c in long)
    measured = f"{len(bad)} of {len(long) + len(short)} end elsewhere; {stopped} ended their turn"
    if not stopped and not bad:
        yield Finding(law, session.subject, measured, expected, "not applicable", "No completion ended its turn.")
        return
    yield session.finding(
        law, measured, expected, not bad,
        "A completion ends elsewhere, or without the token that ended it, so the end of turn is not trained; does the "
        "server have other end tokens or another chat template?",
    )  # fmt: skip


def stop_strings(session: SamplerAudit) -> Iterator[Finding]:
    law, expected, decode = "stop strings", "ends with the token that completes it", session.policy.decode
    request = AuditedRequest(None, session.prompts[0], session.spec(max_new_tokens=12))
    for prompt in session.prompts:
        request = replace(request, prompt=prompt)
        tokens = session.ask(request)[0].tokens
        pieces = [decode([t]).strip() for t in tokens if t not in session.ends]
        stop = next((piece for piece in pieces[1:] if piece), None)
        if stop is not None:
            break
    if stop is None:
        yield Finding(law, session.subject, "-", expected, "not applicable", "No completion has a second word.")
        return
    try:
        (found,) = session.ask(request, stop=[stop])
    except RequestRefused as error:
        yield session.refused(law, error)
        return
    whole, before = decode(list(found.tokens)), decode(list(found.tokens[:-1]))
    exact = stop in whole and stop not in before
    right = exact and float((values([[found]]) - session.own([request], [[found]])).abs().mean()) <= session.allowed
    yield session.finding(
        law, f"{stop!r} stopped at {whole!r}", expected, right,
        "The tokens do not end where the string is completed, or their log-probs are others: leave stop strings out "
        "(earnest refuses them with a server).",
    )  # fmt: skip


def independent(session: SamplerAudit) -> Iterator[Finding]:
    """Completions of one request: pairs with the same first token, against the number that independent draws have."""
    law, n = "n > 1", 16
    equal, expected, variance, same = 0, 0.0, 0.0, 0
    for prompt in session.prompts:
        found = session.ask(AuditedRequest(None, prompt, session.spec(temperature=HOT)), n)
        p = (session.logits(None, prompt)[-1] / HOT).softmax(-1)
        two, three = float((p**2).sum()), float((p**3).sum())
        equal += sum(a.tokens[0] == b.tokens[0] for a, b in combinations(found, 2))
        same += len({c.tokens for c in found}) == 1
        expected += math.comb(n, 2) * two
        variance += math.comb(n, 2) * two * (1 - two) + 6 * math.comb(n, 3) * (three - two**2)
    off = (equal - expected) / math.sqrt(max(variance, 1.0))
    measured = f"{equal} pairs with the same first token; {same} of {len(session.prompts)} requests with one answer"
    yield session.finding(
        law, measured, f"{expected:.0f} ± {math.sqrt(variance):.0f}; fewer requests",
        abs(off) <= SURPRISE and same < len(session.prompts),
        "The completions of one request are not independent draws, so a group has fewer different answers than it "
        "counts.",
    )  # fmt: skip


LAWS = {
    "token ids": token_ids,
    "log-probs": log_probs,
    "draws": draws,
    "top-p": _truncated("top-p", top_p=0.6),
    "top-k": _truncated("top-k", top_k=3),
    "min-p": _truncated("min-p", min_p=0.2),
    "seeds": seeds,
    "end tokens": end_tokens,
    "stop strings": stop_strings,
    "n > 1": independent,
}
