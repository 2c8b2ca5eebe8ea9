"""The loop: ask, verify, give feedback, wait until it is learned, measure.

margin        mean over held-out pairs of Σ log π(chosen) - Σ log π(rejected), nats
compliance    share of answers to held-out probes that the verifier accepts
capability    share of questions whose right answer is the likeliest allowed one, and that relative to the base
collapse      the gate's numbers for the live version: entropy ratio, self-similarity, log-prob drift
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from earnest.disk import write_json, write_text
from earnest.serve.eval.client import EvalClient
from earnest.serve.eval.preferences import FeedbackEvalConfig, Question, UserPreference

COLLAPSE = ("entropy_ratio", "self_similarity", "drift")


@dataclass(frozen=True)
class Round:
    """What was measured after a round; round 0 is before any feedback."""

    preference: str
    round: int
    version: int
    margin: float
    compliance: float
    capability: float
    said: int = 0
    complied: int = 0
    candidates: int = 0
    collapse: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


def evaluate(client: EvalClient, config: FeedbackEvalConfig, out: Path, say: Callable[[str], None]) -> list[Round]:
    """Every preference on an adapter of its own; ``steps.jsonl``, ``summary.json`` and ``summary.md`` in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    client.wait()
    found: list[Round] = []
    lines: list[str] = []
    for preference in config.preferences:
        loop = _Loop(client, config, preference, f"eval/{preference.name}", config.asked())
        client.call("POST", "/v1/adapters", {"name": loop.name, "learn": config.learn})
        try:
            for row in loop.rounds():
                say(_line(row))
                found.append(row)
                lines.append(json.dumps(asdict(row)))
                write_text(out / "steps.jsonl", "\n".join(lines) + "\n")
        finally:
            client.call("DELETE", f"/v1/adapters/{loop.name}")
    summary = summarise(found)
    write_json(out / "summary.json", summary)
    write_text(out / "summary.md", table(summary))
    return found


@dataclass(frozen=True)
class _Loop:
    """One preference, learned and measured on the adapter ``name``."""

    client: EvalClient
    config: FeedbackEvalConfig
    preference: UserPreference
    name: str
    questions: list[Question]

    def rounds(self) -> Iterator[Round]:
        per_round, known = self.config.per_round, self.preference.prompts
        yield self._measure(0, 0, 0, [])
        for number in range(1, self.config.rounds + 1):
            start = (number - 1) * per_round
            wrong: list[dict[str, Any]] = []
            for i in range(per_round):
                completion, (answer,) = self._ask(known[(start + i) % len(known)], seed=1000 * number + i)
                if not self.preference.verifier.holds(answer):
                    wrong.append({"completion_id": completion, "text": self.preference.feedback})
            states = self.client.settled(self.client.teach(wrong)) if wrong else []
            yield self._measure(number, len(wrong), per_round - len(wrong), states)

    def _ask(self, prompt: str, **sampling: int) -> tuple[str, list[str]]:
        config = self.config
        return self.client.chat(
            self.name, prompt, max_tokens=config.max_tokens, temperature=config.temperature, **sampling
        )

    def _measure(self, number: int, said: int, complied: int, states: list[dict[str, Any]]) -> Round:
        client, name, preference = self.client, self.name, self.preference
        margin = fmean(
            client.score(name, p.prompt, p.chosen) - client.score(name, p.prompt, p.rejected) for p in preference.pairs
        )
        answers = [a for probe in preference.probes for a in self._ask(probe, n=self.config.samples, seed=7)[1]]
        right = [max(q.allowed, key=lambda a: client.score(name, q.prompt, a)) == q.answer for q in self.questions]
        live = client.call("GET", f"/v1/adapters/{name}")["live"]
        versions = client.call("GET", f"/v1/adapters/{name}/versions")["data"]
        made = {s["version"] for s in states if s["version"] is not None}
        refused = [v for v in versions if v["number"] in made and v["status"] == "candidate"]
        notes = [s["note"] for s in states if s["note"]]
        collapse = {}
        if live:
            record = client.call("GET", f"/v1/adapters/{name}/versions/{live}")
            collapse = {k: record["metrics"]["gate"][k] for k in COLLAPSE}
        return Round(
            preference=preference.name,
            round=number,
            version=live,
            margin=margin,
            compliance=fmean(preference.verifier.holds(a) for a in answers),
            capability=fmean(right),
            said=said,
            complied=complied,
            candidates=len(refused),
            collapse=collapse,
            reasons=tuple(dict.fromkeys([v["reason"] for v in refused] + notes)),
            answers=tuple(answers[:3]),
        )


def _line(row: Round) -> str:
    more = f", {row.candidates} refused by the gate" if row.candidates else ""
    return (
        f"{row.preference:<10} round {row.round}: margin {row.margin:+7.2f}  compliance {row.compliance:4.0%}  "
        f"capability {row.capability:4.0%}  version {row.version}  ({row.said} feedbacks{more})"
    )


def summarise(rounds: list[Round]) -> dict[str, Any]:
    """First and last values of each preference; capability retained is last / first."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(r.preference for r in rounds):
        own = [r for r in rounds if r.preference == name]
        first, last = own[0], own[-1]
        found[name] = {
            "rounds": last.round,
            "version": last.version,
            "feedback": sum(r.said for r in own),
            "margin": [first.margin, last.margin],
            "compliance": [first.compliance, last.compliance],
            "capability": [first.capability, last.capability],
            "capability_retained": last.capability / first.capability if first.capability else None,
            "collapse": last.collapse,
            "refused": sum(r.candidates for r in own),
        }
    return found


def table(summary: dict[str, Any]) -> str:
    head = "| preference | feedback | margin (nats) | compliance | capability retained | entropy ratio | "
    lines = [head + "self-similarity | drift |", "|" + " --- |" * 8]
    for name, s in summary.items():
        kept = s["capability_retained"]
        cells = [
            name,
            str(s["feedback"]),
            f"{s['margin'][0]:+.2f} → {s['margin'][1]:+.2f}",
            f"{s['compliance'][0]:.0%} → {s['compliance'][1]:.0%}",
            "–" if kept is None else f"{kept:.0%}",
            *(f"{s['collapse'][k]:.2f}" if k in s["collapse"] else "–" for k in COLLAPSE),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
