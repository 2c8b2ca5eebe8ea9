"""The batches of a run: which prompts, seeds and rows of the user's file each step gets. ``collect`` does the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from earnest.data.rendering import stretches
from earnest.models import SampleSpec
from earnest.models.protocol import PolicyLike
from earnest.rollouts import Attempt, Rollouts, Trajectory, collect, graded
from earnest.rollouts.attempts import Sample
from earnest.rollouts.conversing import Conversations
from earnest.runs.own_data import HELDOUT_SEED
from earnest.runs.setup import Setup
from earnest.seeds import derive
from earnest.signals.teachers import Informed, TaughtTurn
from earnest.tasks import Environment, Prompt, PromptStream, Task


def attempt(
    setup: Setup,
    prompts: Sequence[Prompt],
    n: int,
    spec: SampleSpec,
    task: Task | Environment | None = None,
    sample: Sample | None = None,
) -> Conversations:
    """``n`` graded completions or conversations of every prompt of the run's task, or of ``task``, prompt by prompt,
    with the run's settings and its sampler, or with ``sample``."""
    task, config = task or setup.task, setup.config
    assert task is not None, "there are prompts only where there is a task"
    errors, sample = config.max_grader_errors, sample or setup.elsewhere
    return graded(setup.engine, task, prompts, n, spec, config.turns, sample=sample, max_grader_errors=errors)


class BatchSource:
    """The batch of each step. Its order depends on the seed and ``purpose``, so the check does not change training."""

    def __init__(self, setup: Setup, purpose: str = "train", position: int = 0) -> None:
        self.setup, self.purpose = setup, purpose
        seed = derive(setup.config.seed, purpose) % 2**31
        self.stream = None if setup.task is None else PromptStream(setup.task, seed, position=position)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the order of the prompts; the order of the user's rows needs the step only."""
        return {"position": 0 if self.stream is None else self.stream.position}

    def next(self, step: int) -> Rollouts:
        """The batch of ``step``, with every signal that the objective reads."""
        prompts = [] if self.stream is None else self.stream.next(self.setup.config.sampling.prompts_per_step)
        found, samplers = self.collect(step, prompts), self.setup.samplers
        return found if samplers is None else replace(found, metrics=found.metrics | samplers.metrics)

    def spec(self, number: int) -> SampleSpec:
        """How the batch with this number (from 1) is sampled."""
        return spec_of(self.setup, derive(self.setup.config.seed, f"{self.purpose} sampling", number))

    def collect(self, number: int, prompts: Sequence[Prompt], made: Conversations | None = None) -> Rollouts:
        """The batch with this number, of these prompts; ``made``: what was sampled of them before."""
        setup, config = self.setup, self.setup.config
        count = config.sampling.prompts_per_step
        return collect(
            setup.engine,
            setup.task,
            prompts,
            config.sampling.completions_per_prompt,
            self.spec(number),
            objective=setup.objective,
            estimator=config.advantages,
            teacher=setup.teacher,
            given=() if setup.data is None else setup.data.rows(config.seed, self.purpose, number, count),
            sample=setup.elsewhere,
            turns=config.turns,
            made=made,
            max_grader_errors=config.max_grader_errors,
        )


def sample_record(
    a: Attempt, phase: str, step: int, policy: PolicyLike, taught: Sequence[Informed | None] = ()
) -> dict[str, Any]:
    """A line of samples.jsonl. ``taught``: what a self-teacher read and covered, for each row."""
    return _conversation(a.rollout, policy, taught) | {
        "phase": phase,
        "step": step,
        "version": a.rollout.policy_version,
        "prompt_id": a.prompt.id,
        "sample": a.rollout.sample_index,
        "prompt": [dict(m) for m in a.prompt.messages],
        "completion": a.text,
        "reward": a.grade.reward,
        "correct": a.grade.correct,
        "feedback": a.grade.feedback,
        "tokens": len(a.rollout.tokens),
        "cut_off": a.rollout.finish == "length",
    }


def _conversation(rollout: object, policy: PolicyLike, taught: Sequence[Informed | None]) -> dict[str, Any]:
    """The segments of a conversation, with their author, the text of their tokens and the number of tokens that a
    teacher covered, and the prompts that it read; nothing for a completion."""
    if not isinstance(rollout, Trajectory):
        return {}

    def text(tokens: Sequence[int]) -> str:
        return str(policy.tokenizer.decode(tokens, skip_special_tokens=False))

    found: list[dict[str, Any]] = []
    read: list[str] = []
    for row, segments in enumerate(rollout.rows):
        lesson = taught[row] if taught else None
        first, last = (lesson.first, lesson.last) if isinstance(lesson, TaughtTurn) else (0, sys.maxsize)
        if lesson is not None:
            read.append(text(lesson.prompt if isinstance(lesson, TaughtTurn) else lesson))
        active = 0
        for segment in segments:
            line = {"row": row, "author": segment.author, "text": text(segment.tokens), "tokens": len(segment.tokens)}
            if segment.author == "policy":
                if lesson is not None:
                    line["taught"] = max(0, min(last, active + len(segment.tokens)) - max(first, active))
                active += len(segment.tokens)
            found.append(line)
    made = {"ending": rollout.ending, "turn_rewards": list(rollout.turn_rewards), "segments": found}
    return made | ({"teacher_read": read} if read else {})


def own_samples(
    setup: Setup, phase: str, step: int, version: int, measure: str, each: Sequence[float]
) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: held-out rows of the user's file, each with its loss or margin (``each`` has those of
    all measured rows), the file's own answer, and a completion of its prompt. A plain text is completed from its first
    half. A completion may be as long as the longest of the file's answers; rows whose prompt leaves no room for
    ``sampling.max_new_tokens`` are left out."""
    data, spec, policy = setup.data, spec_of(setup, HELDOUT_SEED), setup.policy
    assert data is not None, "they are samples on the user's data"
    measured = data.heldout_places(setup.config.eval.prompts)
    shown: list[tuple[int, list[dict[str, str]], str, Sequence[int]]] = []
    context, longest = policy.positions or 2**31, spec.max_new_tokens
    for place in data.heldout_places(min(setup.config.samples.heldout, len(measured))):
        example = data.dataset.at("heldout", place)
        rows = data.dataset.rendered(example)
        if example.prompt:
            tokens: Sequence[int] = policy.render(example.prompt, tools=example.tools or None)
            prompt = [{"role": m["role"], "content": _plain(m.get("content"))} for m in example.prompt]
            answer = _plain(example.reply[0].get("content"))
        else:
            (row,) = rows
            tokens = row.tokens[: (len(row) + 1) // 2]
            prompt = [{"role": "text", "content": policy.decode(tokens)}]
            answer = policy.decode(row.tokens[len(tokens) :])
        if len(tokens) + spec.max_new_tokens <= context:
            shown.append((place, prompt, answer, tokens))
            longest = max(longest, *(sum(row.trained) for row in rows))
    if shown:
        room = context - max(len(tokens) for *_, tokens in shown)
        spec = replace(spec, max_new_tokens=min(longest, room))
    found = setup.sample([tokens for *_, tokens in shown], 1, spec) if shown else []
    return [
        {
            "phase": phase,
            "step": step,
            "version": version,
            "prompt_id": f"held-out row {place + 1}",
            "sample": 0,
            "prompt": prompt,
            "completion": policy.decode(rollout.tokens),
            "feedback": f"in the file: {answer}",
            "tokens": len(rollout.tokens),
            "cut_off": rollout.finish == "length",
            "loss" if measure == "loss" else "margin": each[measured.index(place)],
        }
        for (place, prompt, answer, _), rollout in zip(shown, found, strict=True)
    ]


SHOWN_ROWS = 8
"""Training rows of the user's file that are recorded."""


def own_rows(setup: Setup) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: the first training rows of the user's file, with the trained tokens marked."""
    data = setup.data
    if data is None or not setup.config.samples.train:
        return []
    found = []
    for place in range(min(SHOWN_ROWS, data.dataset.size("train"))):
        example = data.dataset.at("train", place)
        names = ["chosen", "rejected"] if example.kind == "pair" else ["wanted" if example.label else "unwanted"]
        for number, row in enumerate(data.dataset.rendered(example)):
            name = f", {names[number]}" if example.kind in ("pair", "judged") else ""
            segments = [
                {"row": 0, "author": "data" if trained else "template", "text": text, "tokens": count}
                for trained, count, text in stretches(setup.policy.tokenizer, row)
            ]
            found.append(
                {
                    "phase": "train",
                    "step": 0,
                    "version": 0,
                    "prompt_id": f"training row {place + 1}{name}",
                    "sample": number,
                    "prompt": [],
                    "completion": "",
                    "segments": segments,
                }
            )
    return found


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def spec_of(setup: Setup, seed: int) -> SampleSpec:
    """How the run samples."""
    sampling = setup.config.sampling
    return SampleSpec(max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, seed=seed)
