"""``earnest export RUN``: a trained policy in a format that other programs read, compared before it is called done.

    merged   a Hugging Face folder: weights with the adapter merged in, tokenizer, template, generation config
    peft     the adapter in PEFT's format
    lora     a plain LoRA for vLLM, SGLang, TGI and llama.cpp

The folder is written under another name, loaded again, and compared with the run's policy on its held-out prompts. It
gets its name only if the logits agree.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from earnest.adapters import Adapter, AdapterError, load_adapter
from earnest.adapters.files import CONFIG, OWN_CONFIG, OWN_MODEL, adapter_folder, base_model_of, read_json
from earnest.adapters.trained import load_trained
from earnest.adapters.whole import write_merged
from earnest.errors import ConfigError, EarnestError
from earnest.models import Policy, load
from earnest.models.loading import Dtype
from earnest.report.headline import TITLES
from earnest.report.load import load as read_run
from earnest.report.record import Run
from earnest.version import __version__

Form = Literal["merged", "peft", "lora"]
ROWS, TOKENS = 8, 64
"""The comparison reads this many rows, and the last tokens of each."""
PROMPTS = ("What is 2 + 3?", "Name three colours.", "Write a sentence about the sea.", "Sort 3142.")
"""Prompts of a folder that has no record of a run."""


@dataclass(frozen=True)
class Exported:
    """A written folder. ``difference`` is the largest between its logits and the policy's, ``base_difference`` that of
    the untrained base."""

    folder: Path
    form: Form
    difference: float
    base_difference: float
    rows: int
    tokens: int
    prompts: str
    address: str | None = None

    def __str__(self) -> str:
        lines = [
            f"exported         {self.folder} ({self.form})",
            f"compared         largest difference of the logits {self.difference:.2g} on {self.rows} {self.prompts} "
            f"({self.tokens} tokens); the base differs by {self.base_difference:.2g}",
        ]
        return "\n".join(lines + ([f"pushed           {self.address}"] if self.address else []))


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    form: Form = "merged",
    push: str | None = None,
    model: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write the policy of a run folder (or of an adapter's folder) to ``out``; None: RUN/export/FORM.

    ``push`` uploads the folder to this id of the Hugging Face hub, as a private repository if it is new. ``model``
    replaces the base that the adapter names.
    """
    run = Path(run)
    if form not in get_args(Form):
        raise ConfigError(f"form is {form!r}; give one of {', '.join(get_args(Form))}.")
    out = run / "export" / form if out is None else Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists already; remove it, or give another folder.")
    record = read_run(run) if (run / "run.json").is_file() else None
    base, dtype = model or base_model_of(run), _dtype(record)
    say(f"loading {base}")
    policy, adapter = load_trained(run, model, dtype=dtype)
    rows, prompts = _rows(policy, record)
    want = _logits(policy, rows)
    with adapter.off():
        untrained = _logits(policy, rows)
    fresh = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    try:
        say(f"writing {out}")
        _write(adapter, fresh, form)
        template = policy.tokenizer.chat_template
        if form != "merged":
            policy.tokenizer.save_pretrained(fresh)
        del adapter, policy
        say("loading it again, and comparing")
        got = _logits(_reloaded(fresh, form, str(base), dtype, template), rows)
        done = Exported(
            out, form, _gap(got, want), _gap(untrained, want), len(rows), sum(len(t) for t in want), prompts
        )
        _require_same(done, want, dtype)
        (fresh / "README.md").write_text(card(done, record, str(base)), encoding="utf-8")
        fresh.rename(out)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return done if push is None else replace(done, address=_push(out, push, say))


def _dtype(record: Run | None) -> Dtype:
    """The dtype that the run trained in."""
    found = str((record.environment or {}).get("dtype", "auto")) if record is not None else "auto"
    names: tuple[Dtype, ...] = get_args(Dtype)
    return next((name for name in names if name == found.removeprefix("torch.")), "auto")


def _rows(policy: Policy, record: Run | None) -> tuple[list[list[int]], str]:
    """Token rows to compare on, and what they are: held-out prompts of the run with their answers."""
    found: dict[str, list[int]] = {}
    for sample in record.samples if record is not None else ():
        if sample.prompt and sample.prompt_id not in found and len(found) < ROWS:  # a training row has no prompt
            messages = [m.model_dump(exclude_none=True) for m in sample.prompt]
            found[sample.prompt_id] = [*policy.render(messages), *policy.encode(sample.completion)]
    what = "prompts of the run" if found else "fixed prompts"
    rows = list(found.values()) or [policy.render([{"role": "user", "content": text}]) for text in PROMPTS]
    return [row[: policy.positions] for row in rows], what


@torch.no_grad()
def _logits(policy: Policy, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits at the last tokens of each row, in fp32 on the CPU."""
    found = []
    for row in rows:
        hidden = policy.hidden(torch.tensor([list(row)], device=policy.device))[0, -TOKENS:]
        found.append(policy.head.logits(hidden).float().cpu())
    return found


def _gap(one: Sequence[Tensor], two: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))


def _write(adapter: Adapter, folder: Path, form: Form) -> None:
    if form == "merged":
        write_merged(adapter, folder)
    elif form == "lora":
        adapter.export_lora(folder)
    elif adapter.variant.uses("replace"):
        raise AdapterError(
            f"{adapter.variant.name} trains the weights themselves, so it is no adapter; export as merged"
        )
    else:
        adapter.save(folder)
        if not (folder / CONFIG).is_file():
            raise AdapterError(f"{read_json(folder / OWN_CONFIG)['peft']} (export as merged)")
        for own in (OWN_CONFIG, OWN_MODEL):
            (folder / own).unlink()


def _reloaded(folder: Path, form: Form, base: str, dtype: Dtype, template: str | None) -> Policy:
    """The exported policy, from its files alone (and the base, if they are an adapter)."""
    if form == "merged":
        return load(folder, dtype=dtype)
    policy = load(base, dtype=dtype)
    policy.tokenizer.chat_template = template
    load_adapter(policy, adapter_folder(folder))
    return policy


def _require_same(done: Exported, want: Sequence[Tensor], dtype: Dtype) -> None:
    """Raise if the exported logits differ by more than rounding, or are no nearer than the base's."""
    largest = max(float(t.abs().max()) for t in want)
    allowed = (3e-2 if dtype in ("bfloat16", "float16") else 1e-4) * largest
    if not done.difference <= allowed or 0 < done.base_difference <= done.difference:
        raise EarnestError(
            f"the exported policy is not the trained one: its logits differ by {done.difference:.2g} (allowed "
            f"{allowed:.2g}; the base differs by {done.base_difference:.2g}), so nothing was written; export in "
            "another form, or report this."
        )


def _push(folder: Path, name: str, say: Callable[[str], None]) -> str:
    from huggingface_hub import HfApi

    say(f"pushing to {name}")
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder))
    except Exception as error:  # the hub's client raises many kinds
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EarnestError(
            f"{folder} is written and compared, but was not pushed to {name} ({first}); check the network and "
            f"`hf auth login`, then `hf upload {name} {folder}`."
        ) from error
    return f"https://huggingface.co/{name}"


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
