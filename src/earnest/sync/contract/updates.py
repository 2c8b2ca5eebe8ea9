"""The laws of updates: adapters that are pushed, replaced and unloaded, and requests at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from earnest.sync import behaviour
from earnest.sync.base import Weights
from earnest.sync.contract.session import AuditedRequest, SamplerAudit, values
from earnest.sync.probe import apart
from earnest.sync.server import RequestRefused
from earnest_audit.verdict import Finding


def adapter(session: SamplerAudit) -> Iterator[Finding]:
    """Scores of fixed text, with the adapter against without it."""
    yield _followed(session, "adapter", session.version(1), None, behaviour.BASE)


def perturbation(session: SamplerAudit) -> Iterator[Finding]:
    session.load(session.version(1))
    meaning = (
        "The log-probs are those of the version before: the server accepted the push and did not apply it. Look at its "
        "log, and remove caches between it and the trainer."
    )
    yield _followed(session, "perturbation", session.version(2), session.version(1), meaning)


def _followed(session: SamplerAudit, law: str, weights: Weights, before: Weights | None, meaning: str) -> Finding:
    session.load(weights)
    model = session.name_of(weights)
    theirs = torch.tensor([v for row in session.prompts for v in session.server.score(model, row)], dtype=torch.float64)
    own, old = session.scores(weights, session.prompts), session.scores(before, session.prompts)
    off = apart(theirs, own)
    why = meaning if apart(theirs, old) <= session.allowed else behaviour.UNKNOWN
    moved = f"{off:.2g} nats per token off; the weights moved it by {apart(own, old):.2g}"
    return session.finding(law, moved, f"≤ {session.allowed:g}", off <= session.allowed, why)


def prefix_cache(session: SamplerAudit) -> Iterator[Finding]:
    """Prompts that were sampled under the version before, so that their prefixes are cached: once under the new
    version's name, and once under the old name, which now has the new weights."""
    old, new = session.version(1), session.version(2)
    long = tuple(t for prompt in session.prompts for t in prompt)
    name = session.load(old)
    asked = [AuditedRequest(old, p, session.spec()) for p in (long, *session.prompts)]
    for request in asked:
        session.ask(request)
        session.ask(request)
    session.load(new)
    after = [replace(r, weights=new) for r in asked]
    yield _sampled(session, "prefix cache", after, session.name_of(new))
    session.unload(old)
    session.server.load(name, new)
    try:
        yield _sampled(session, "reused name", after, session.server.model(name))
    finally:
        session.server.unload(name)


def _sampled(session: SamplerAudit, law: str, asked: list[AuditedRequest], model: str) -> Finding:
    found = [session.ask(r, model=model) for r in asked]
    return session.judged(law, asked, found, sentence=STALE[law])


STALE = {
    "prefix cache": "What is sampled after a push uses the KV cache of the weights before it: the cache is not cleared "
    "by an update. Clear it after each push, or start the server without a prefix cache.",
    "reused name": "A name that was unloaded and loaded again with other weights finds the KV cache of the old ones. "
    "Give every version a name of its own, as earnest does, or clear the cache after each push.",
}


def versions(session: SamplerAudit) -> Iterator[Finding]:
    law, weights = "versions", session.version(1)
    name = session.load(weights)
    model = session.server.model(name)

    def listed() -> bool:
        return any(str(m.get("id")) in (name, model) for m in session.server.models())

    there = listed()
    session.unload(weights)
    gone = not listed()
    try:
        session.ask(AuditedRequest(weights, session.prompts[0], session.spec()), model=model)
        refused = "answered"
    except RequestRefused as error:
        refused = f"refused (HTTP {error.status})"
    yield session.finding(
        law, f"{'listed' if there else 'not listed'} after the push, {'not listed' if gone else 'listed'} after the "
        f"unload; then {refused}",
        "listed, not listed, refused", there and gone and refused != "answered",
        "A name that was unloaded is still answered, by the base or by old weights: a lost push would not be noticed.",
    )  # fmt: skip


def isolation(session: SamplerAudit) -> Iterator[Finding]:
    """Requests at the same time, each with its own weights, temperature and seed: two adapters, then also the base."""
    first, second = session.version(1), session.version(2)
    session.load(first)
    session.load(second)
    wanted: list[tuple[Weights | None, float]] = [(first, 0.6), (second, 1.4)]
    yield _at_once(session, "isolation", wanted, "Adapters")
    yield _at_once(session, "base isolation", [*wanted, (None, 1.0)], "The base model and adapters")


def _at_once(session: SamplerAudit, law: str, wanted: list[tuple[Weights | None, float]], who: str) -> Finding:
    asked = [
        AuditedRequest(weights, prompt, session.spec(temperature=temperature, seed=seed))
        for seed, prompt in enumerate(session.prompts)
        for weights, temperature in wanted
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(session.ask, asked))
    offs = [apart(values([c]), session.own([r], [c])) for r, c in zip(asked, found, strict=True)]
    wrong = sum(not off <= session.allowed for off in offs)
    return session.finding(
        law, f"{wrong} of {len(asked)} requests at once have others' log-probs", "none", wrong == 0,
        f"{who} that are requested at the same time change each other's weights, temperature or log-probs; send such "
        "requests one after the other, or to servers of their own.",
    )  # fmt: skip


LAWS = {
    "adapter": adapter,
    "perturbation": perturbation,
    "prefix cache": prefix_cache,
    "versions": versions,
    "isolation": isolation,
}
