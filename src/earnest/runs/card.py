"""The model card of an exported policy: what was trained, and the evidence in the run's record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from earnest.report.headline import TITLES
from earnest.report.record import Run
from earnest.version import __version__

if TYPE_CHECKING:
    from earnest.runs.export import Exported


def card(done: Exported, run: Run | None, base: str) -> str:
    """README.md, as the Hugging Face hub reads it."""
    front = ({"base_model": base} if "/" in base and not Path(base).exists() else {}) | {
        "library_name": "transformers" if done.form == "merged" else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["earnest"],
    }
    title = f"{run.header.task} on {run.header.model}" if run is not None else f"trained on {base}"
    facts = _facts(run) if run is not None else {}
    facts["export"] = (
        f"{done.form}; the largest difference of its logits from the trained policy's is {done.difference:.2g} on "
        f"{done.rows} {done.prompts} ({done.tokens} tokens), that of the base {done.base_difference:.2g}"
    )
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", "", f"# {title}", ""]
    lines += [f"Trained with earnest {__version__}.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {str(value).replace('|', '/')} |" for name, value in facts.items()]
    if run is not None and run.gaps:
        lines += ["", "Gaps in the record:", "", *(f"- {gap}" for gap in run.gaps)]
    if run is not None and run.config:
        lines += ["", "## Settings", "", "```yaml", run.config.strip(), "```"]
    return "\n".join(lines) + "\n"


def _facts(run: Run) -> dict[str, str]:
    header = run.header
    found = {
        "base model": str(header.model),
        "recipe": header.recipe,
        "adapter": header.adapter or "none",
        "objective": header.objective,
        "steps": f"{header.steps_done:,} of {header.steps:,} ({header.status})",
        "seed": str(header.seed),
    }
    if header.data is not None and "sha256" in header.data:
        found["data"] = f"rows with sha256 {header.data['sha256']}"
    change = run.change
    if change is not None and change.gain is not None:
        before, after = change.before, change.after
        error = "" if change.se is None else f" ± {change.se:.3f}"
        found[TITLES[after.measure].lower()] = (
            f"{before.value:.3f} → {after.value:.3f}, change {change.gain:+.3f}{error} ({after.prompts} prompts)"
        )
    if run.verdict is not None:
        count = run.verdict.count
        found["checks of the training step"] = f"{count('holds')} hold, {count('fails')} fail"
    packages = (run.environment or {}).get("packages", {})
    found["software"] = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages)
    return {name: value for name, value in found.items() if value}
