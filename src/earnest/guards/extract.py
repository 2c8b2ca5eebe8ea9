"""Directions from contrastive triples (prompt, unwanted completion, wanted completion), in the parameters of an engine.

    gradients     D = ∇L on the batch {unwanted with A = +1, wanted with A = -1}, on-policy
    activations   D = -∂⟨d, ȳ⟩/∂θ of each module alone, d = ȳ(unwanted) - ȳ(wanted), ȳ its mean output over a completion

L is the training objective itself, with its normaliser (sequences, tokens, a constant). A descent step along D makes
the unwanted completion more likely relative to the wanted one. SFT has no advantages: there D is the difference of the
two rows' parts of its token mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earnest.engines.local import LocalEngine
from earnest.guards.assemble import assemble
from earnest.guards.directions import Directions
from earnest.guards.errors import GuardError
from earnest.models.replies import reply_tokens
from earnest.objectives.base import Objective, Term
from earnest.signals.batch import Batch
from earnest.signals.scorer import LogProbsWanted

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Triple:
    """A prompt, an unwanted completion and a wanted one."""

    prompt: tuple[Message, ...]
    unwanted: str
    wanted: str


def read_triples(path: Path | str) -> list[Triple]:
    """A JSONL file: {"prompt": text or messages, "unwanted": text, "wanted": text} per line."""
    path = Path(path)
    if not path.is_file():
        raise GuardError(f"there is no file of triples at {path}; give the path of a JSONL file.")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            prompt = data["prompt"]
            messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
            found.append(Triple(messages, str(data["unwanted"]), str(data["wanted"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise GuardError(
                f'{path}:{number}: a line is {{"prompt": …, "unwanted": …, "wanted": …}} ({error}).'
            ) from error
    return found


def directions_from_gradients(
    engine: LocalEngine,
    triples: Sequence[Triple],
    objective: Objective | Term,
    *,
    temperature: float = 1.0,
    max_length: int | None = None,
    **settings: Any,
) -> Directions:
    """``settings`` go to ``assemble``; ``temperature`` and ``max_length`` are those of the training batches."""
    objective = Objective.of(objective)
    ruled = tuple(w for w in objective.live() if "advantages" in w.term.signals())
    shown = tuple(w for w in objective.live() if w.term.roles == ("demonstration",))
    if not ruled and not shown:
        raise GuardError(
            f"the objective {[w.term.label for w in objective.terms]} has no term that makes a completion more likely; "
            "give the training objective, such as GRPO() or SFT()."
        )
    chosen = Objective(ruled or shown)

    rows = [_rows(engine, triple) for triple in triples]
    contrasts = _contrasts(engine, rows, temperature, max_length) if ruled else None

    def of(number: int) -> Mapping[str, Tensor]:
        if contrasts is not None:
            return engine.gradients(contrasts.rows([2 * number, 2 * number + 1]), chosen)
        return _demonstrations(engine, rows[number], chosen)

    kinds = " + ".join(w.term.label for w in chosen.terms)
    return _directions(of, len(triples), {"source": f"gradients of {kinds}"} | settings)


def directions_from_activations(engine: LocalEngine, triples: Sequence[Triple], **settings: Any) -> Directions:
    """Directions per module from its own outputs: no gradient passes between modules."""
    names = {id(p): n for n, p in zip(engine.names, engine.parameters, strict=True)}
    if engine.trained.any_sharded:
        raise GuardError(
            "directions from activations need whole parameters, and modules that are trained whole are sharded; use "
            "directions from gradients, or set engine.shard=1."
        )

    def of(number: int) -> Mapping[str, Tensor]:
        prompts, replies = _rows(engine, triples[number])
        batch = Batch.from_rows(prompts, replies, pad=engine.policy.pad_id, device=engine.policy.device)
        with torch.enable_grad(), _outputs(engine) as outputs:
            engine.policy.hidden(batch.inputs)
        loss = torch.zeros((), device=batch.device)
        for y in outputs:
            means = [y[batch.row[batch.row == r], batch.position[batch.row == r]].float().mean(0) for r in (0, 1)]
            loss = loss - ((means[0] - means[1]).detach() * means[0]).sum()
        grads = torch.autograd.grad(loss, engine.parameters, allow_unused=True)
        return {
            names[id(p)]: torch.zeros_like(p) if g is None else g for p, g in zip(engine.parameters, grads, strict=True)
        }

    return _directions(of, len(triples), {"source": "activations"} | settings)


def _directions(of: Callable[[int], Mapping[str, Tensor]], count: int, settings: dict[str, Any]) -> Directions:
    if count < 2:
        raise GuardError(f"directions need at least 2 triples, got {count}.")
    rows: dict[str, list[Tensor]] = {}
    with torch.enable_grad():
        for number in range(count):
            for name, grad in of(number).items():
                rows.setdefault(name, []).append(grad.detach().flatten().cpu())
    return assemble({name: torch.stack(found) for name, found in rows.items()}, **settings)


Rows = tuple[list[list[int]], list[list[int]]]


def _rows(engine: LocalEngine, triple: Triple) -> Rows:
    if triple.unwanted == triple.wanted:
        raise GuardError(f"both completions of a triple are {triple.wanted!r}; a contrast needs two different ones.")
    pairs = [reply_tokens(engine.policy, triple.prompt, text) for text in (triple.unwanted, triple.wanted)]
    return [p for p, _ in pairs], [c for _, c in pairs]


def _contrasts(engine: LocalEngine, rows: Sequence[Rows], temperature: float, max_length: int | None) -> Batch:
    """All pairs as one on-policy batch: row 2i unwanted with A = +1, row 2i + 1 wanted with A = -1."""
    batch = Batch.from_rows(
        [p for prompts, _ in rows for p in prompts],
        [c for _, replies in rows for c in replies],
        group=[i for i in range(len(rows)) for _ in range(2)],
        advantages=[1.0, -1.0] * len(rows),
        temperature=temperature,
        max_length=max_length,
        pad=engine.policy.pad_id,
        device=engine.policy.device,
    )
    scored = engine.score(batch, LogProbsWanted(temperature))
    assert isinstance(scored, Tensor)
    return batch.with_signals(behaviour=scored)


def _demonstrations(engine: LocalEngine, rows: Rows, objective: Objective) -> Mapping[str, Tensor]:
    prompts, replies = rows
    total = sum(map(len, replies))
    grads = [
        engine.gradients(
            Batch.from_rows([p], [c], role="demonstration", pad=engine.policy.pad_id, device=engine.policy.device),
            objective,
        )
        for p, c in zip(prompts, replies, strict=True)
    ]
    shares = [len(c) / total for c in replies]
    return {n: shares[0] * grads[0][n] - shares[1] * grads[1][n] for n in grads[0]}


@contextmanager
def _outputs(engine: LocalEngine) -> Iterator[list[Tensor]]:
    """The outputs of the adapted layers, each detached from earlier layers."""
    found: list[Tensor] = []

    def cut(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].detach(), *args[1:])

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        found.append(output)

    handles = []
    for slot in engine.adapter.slots.values():
        handles += [slot.layer.module.register_forward_pre_hook(cut), slot.layer.module.register_forward_hook(keep)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
