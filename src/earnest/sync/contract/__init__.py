"""`earnest audit sampler URL --model FOLDER`: what a trainer needs of a server that samples for it.

    token ids       the exact tokens of prompt and completion, one finite log-prob each
    log-probs       those of the distribution that was sampled, softmax(z / T)
    draws           tokens come from the whole distribution
    top-p, …        top-p, top-k and min-p: log-probs renormalised over what is left, or the request is refused
    seeds           the same seed gives the same tokens, another seed others
    end tokens      a completion ends with the policy's end of turn or at max_tokens, and includes that token
    stop strings    a completion ends with the token that completes the string
    n > 1           the completions of one request are independent
    adapter         a pushed adapter is applied
    perturbation    after the push of other weights the log-probs are those of the new weights
    prefix cache    what is sampled after a push is computed on the new weights, also for prompts that were seen before
    reused name     the same where an unloaded name is loaded again with other weights
    versions        a name is listed from its push to its unload, and refused afterwards
    isolation       requests at the same time have their own adapter, temperature and seed
    base isolation  the same with requests for the base model among them

The server is compared with the policy in ``FOLDER``, computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from earnest.engines.local import LocalEngine
from earnest.errors import ConfigError, EarnestError
from earnest.sync.contract import requests, updates
from earnest.sync.contract.session import SamplerAudit
from earnest.sync.server import KINDS, Server
from earnest_audit.verdict import Finding, Verdict, unchecked

Law = Callable[[SamplerAudit], Iterator[Finding]]
LAWS: dict[str, Law] = {**requests.LAWS, **updates.LAWS}


def audit_sampler(
    server: Server,
    engine: LocalEngine,
    *,
    temperature: float = 0.7,
    laws: Collection[str] = tuple(LAWS),
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Check the contract on a server that should run ``engine``'s policy. The adapter on it is perturbed, and restored
    afterwards; what is pushed to the server is unloaded."""
    if unknown := sorted(set(laws) - set(LAWS)):
        raise ConfigError(f"{unknown[0]!r} is not a law of the contract; there are {', '.join(LAWS)}.")
    session = SamplerAudit(server, engine, temperature)
    findings: list[Finding] = []
    try:
        for name in (law for law in LAWS if law in laws):
            progress(name)
            if name in updates.LAWS and (why := _cannot_push(server)) is not None:
                findings.append(Finding(name, session.subject, "not checked", "-", "not declared", why))
                continue
            try:
                findings += LAWS[name](session)
            except EarnestError as error:
                findings.append(unchecked(name, session.subject, error))
    finally:
        session.close()
    return Verdict(tuple(findings), title=f"{session.describe()}, checked")


def _cannot_push(server: Server) -> str | None:
    if server.kind not in KINDS:
        return f"Adapters can be pushed to {', '.join(KINDS)}; this server's models belong to {server.kind!r}."
    if server.kind != "earnest" and server.folder is None:
        return "Give --folder, which the server reads under the same path, and it is checked."
    return None
