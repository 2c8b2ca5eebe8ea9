"""Conversations of the policy with an environment: sample a turn, parse it, let the environment reply, and so on."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from earnest.errors import ConfigError, EarnestError, SamplingError
from earnest.models import SampleSpec
from earnest.models.protocol import PolicyLike
from earnest.models.sampling import SampleRow
from earnest.models.tool_calls import read_message
from earnest.rollouts.attempts import Attempt, Sample
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.trajectory import Trajectory
from earnest.rollouts.transcript import Transcript
from earnest.rollouts.turn_sampling import CallTurns, HasSlots, SlotTurns, TurnSampler
from earnest.seeds import derive
from earnest.settings import Checked, FieldProblem, setting
from earnest.signals.scorer import Scorer
from earnest.tasks import Ending, Environment, Grade, GraderErrors, Message, Prompt, StepResult, TaskError
from earnest.tasks.grading import DEFAULT_MAX_ERROR_SHARE, TIME_LIMIT
from earnest.tasks.playing import run_to_end

_log = logging.getLogger(__name__)
_THREADS = 64  # calls of asyncio.to_thread at the same time

ReadMessage = Callable[[PolicyLike, Sequence[int], Sequence[int]], Message]
"""(policy, prompt tokens, sampled tokens) → the assistant message."""


class Source(Scorer, Protocol):
    """The members of an engine that collecting uses: it samples whole batches; one with slots (``HasSlots``) decodes
    rows as they come."""

    version: int

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]: ...


def plain_message(policy: PolicyLike, _prompt: Sequence[int], tokens: Sequence[int]) -> Message:
    """The policy's text as a message without tool calls."""
    return {"role": "assistant", "content": policy.decode(tokens)}


@dataclass(frozen=True, kw_only=True)
class TurnSettings(Checked):
    """The limits of a conversation, and how its rewards become advantages.

        G_t = Σ_{k ≥ t} γ^(k-t) r_k + γ^(K-1-t) · grade        the return of turn t of K

    ``credit: trajectory`` compares G_0 of a prompt's conversations, and every token of a conversation gets that
    advantage. ``credit: turn`` compares G_t of the conversations that have a turn t, and each turn's tokens get their
    own; a turn that no other conversation of its prompt has gets 0.
    """

    error: ClassVar[type[EarnestError]] = ConfigError

    max_turns: int = setting(8, "the largest number of turns of the policy in a conversation", at_least=1)
    max_tokens: int | None = setting(
        None, "the most tokens of a conversation, with its prompt; none: the model's positions", at_least=1
    )
    credit: Literal["trajectory", "turn"] = setting(
        "trajectory", "what gets an advantage: the whole conversation, or each of its turns by its own return"
    )
    discount: float = setting(1.0, "γ, the weight of a reward that comes one turn later", above=0.0, at_most=1.0)
    hint: str | None = setting(
        None, "what the teacher reads before a turn that failed, with {hint} for the feedback; none: data/hint.yaml"
    )
    teach: Literal["turn", "onward"] = setting(
        "turn", "what the teacher covers after a hint: the turn that failed, or everything from there on"
    )
    at_once: int = setting(256, "conversations that are decoded at the same time", at_least=1)

    def validate(self) -> None:
        if self.hint is not None and "{hint}" not in self.hint:
            raise FieldProblem(f"hint: {self.hint!r} has no place for the feedback; write {{hint}} in it.")

    def longest(self, policy: PolicyLike, spec: SampleSpec) -> int:
        """The most tokens that the policy can sample in one conversation."""
        limits = [self.max_turns * spec.max_new_tokens, self.max_tokens, policy.positions]
        return min(limit for limit in limits if limit is not None)


@dataclass(frozen=True)
class Conversations:
    """Graded conversations, prompt by prompt, and the completions that their sampler returned, by (prompt, sample)."""

    attempts: list[Attempt]
    drawn: Mapping[tuple[int, int], Sequence[Rollout]]


def converse(
    engine: Source,
    environment: Environment,
    prompts: Sequence[Prompt],
    n: int,
    spec: SampleSpec,
    turns: TurnSettings,
    *,
    sample: Sample | None = None,
    read: ReadMessage | None = None,
    max_errors: float = DEFAULT_MAX_ERROR_SHARE,
) -> Conversations:
    """``n`` graded conversations of every prompt, prompt by prompt. sample: the sampler to use instead of the engine's.
    read: parses the policy's tokens; default: text, and with tools also the calls in the format of the chat template.
    If the environment raised in more than the share ``max_errors`` of the conversations, the run ends."""
    if read is None:
        read = partial(read_message, tools=environment.tools) if environment.tools else plain_message
    with _sampler(engine, spec, turns, len(prompts) * n * spec.max_new_tokens, sample) as sampler:
        found = run_to_end(_Talk(engine.policy, environment, spec, turns, sampler, read).run(prompts, n))
    _check_errors(environment, found.attempts, max_errors)
    return found


@contextmanager
def _sampler(
    engine: Source, spec: SampleSpec, turns: TurnSettings, tokens: int, sample: Sample | None
) -> Iterator[TurnSampler]:
    if sample is not None:
        yield CallTurns(sample, spec)
    elif isinstance(engine, HasSlots):
        with engine.slots(spec, tokens, turns.at_once) as slots:
            yield SlotTurns(slots, spec, engine)
    else:
        yield CallTurns(engine.sample, spec)


@dataclass(frozen=True)
class _Talk:
    policy: PolicyLike
    environment: Environment
    spec: SampleSpec
    turns: TurnSettings
    sampler: TurnSampler
    read: ReadMessage

    async def run(self, prompts: Sequence[Prompt], n: int) -> Conversations:
        """All conversations; they begin together, so that equal first prompts are computed once."""
        keys = [(i, j) for i in range(len(prompts)) for j in range(n)]
        threads = ThreadPoolExecutor(min(len(keys), _THREADS), "environment")
        asyncio.get_running_loop().set_default_executor(threads)  # asyncio's own has hardly more threads than cores
        started = await asyncio.gather(*(self._start(prompts[i]) for i, _ in keys))
        seen: Counter[tuple[int, ...]] = Counter()
        draws = []
        for transcript, _ in started:
            draws.append(seen[transcript.prompt])
            seen[transcript.prompt] += 1
        conversations = asyncio.gather(
            *(self._one(prompts[i], i, j, draw, *pair) for (i, j), draw, pair in zip(keys, draws, started, strict=True))
        )
        serving = asyncio.ensure_future(self.sampler.serve())
        both: list[asyncio.Future[Any]] = [serving, conversations]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return Conversations(await conversations, self.sampler.drawn)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _start(self, prompt: Prompt) -> tuple[Transcript, Any]:
        """The opening. All conversations of a prompt get the same seed, so that their rewards can be compared."""
        try:
            async with asyncio.timeout(TIME_LIMIT):
                opening = await self.environment.reset(prompt, derive(self.spec.seed, f"environment {prompt.id}"))
        except Exception as error:
            raise TaskError(
                f"the environment {self.environment.name} could not start a conversation about prompt {prompt.id}: "
                f"{type(error).__name__}: {error}."
            ) from error
        return Transcript(self.policy, opening.messages, self.environment.tools), opening.state

    def _room(self, prompt: tuple[int, ...]) -> int:
        """The number of tokens that the policy may sample after ``prompt``."""
        limits = [self.spec.max_new_tokens]
        if self.turns.max_tokens is not None:
            limits.append(self.turns.max_tokens - len(prompt))
        if self.policy.positions is not None:
            limits.append(self.policy.positions - len(prompt) + 1)  # the last token is never read
        return min(limits)

    async def _one(self, prompt: Prompt, i: int, j: int, draw: int, transcript: Transcript, state: Any) -> Attempt:
        rewards: list[float] = []
        ending: Ending = "turn_limit"
        problem: str | None = None
        while len(rewards) < self.turns.max_turns:
            tokens = transcript.prompt
            room = self._room(tokens)
            if room < 1:
                if not rewards:
                    raise SamplingError(
                        f"Prompt {prompt.id} has {len(tokens)} tokens, which leaves none for an answer; raise "
                        "turns.max_tokens, or shorten the prompt."
                    )
                ending = "token_limit"
                break
            rollout = await self.sampler.sample(SampleRow(i, j, tokens, draw, room))
            message = self.read(self.policy, rollout.prompt, rollout.tokens)
            transcript.turn(rollout, message)
            rewards.append(0.0)
            try:
                async with asyncio.timeout(TIME_LIMIT):
                    step = _valid(await self.environment.step(state, message))
            except Exception as error:  # an environment is foreign code: what it raises is a finding about it
                ending, problem = "tool_failure", self._problem(error, prompt)
                break
            rewards[-1] = float(step.reward)
            if rollout.finish == "length":
                ending = "token_limit"
                break
            if step.done:
                ending = step.ending
                break
            if len(rewards) < self.turns.max_turns:
                transcript.observe(step.messages)
        self.sampler.ended(i, j)
        grade = await self._grade(state, ending, prompt, problem)
        grade = replace(grade, reward=grade.reward + sum(rewards))
        told, temperature = tuple(transcript.messages), self.spec.temperature or 1.0
        trajectory = Trajectory(i, j, *transcript.finished(), told, tuple(rewards), ending, temperature)
        text = "\n".join(self.policy.decode(turn.tokens) for turn in trajectory.turns())
        return Attempt(prompt, trajectory, text, grade)

    async def _grade(self, state: Any, ending: Ending, prompt: Prompt, problem: str | None) -> Grade:
        try:
            async with asyncio.timeout(TIME_LIMIT):
                found = await self.environment.grade(state, ending)
            if not math.isfinite(found.reward):
                raise ValueError(f"the reward is {found.reward}")
        except Exception as error:
            problem = problem or self._problem(error, prompt)
            found = Grade(0.0, "", False)
        return found if problem is None else replace(found, extras={**found.extras, "error": problem})

    def _problem(self, error: Exception, prompt: Prompt) -> str:
        _log.warning("the environment %s raised %r on prompt %s", self.environment.name, error, prompt.id)
        if isinstance(error, TimeoutError) and not str(error):
            return f"it took longer than {TIME_LIMIT:g} seconds"
        return f"{type(error).__name__}: {error}"


def _valid(step: StepResult) -> StepResult:
    if not isinstance(step, StepResult):
        raise TypeError(f"step returned {step!r}, a {type(step).__name__}, and not a StepResult")
    if not math.isfinite(step.reward):
        raise ValueError(f"the reward of a turn is {step.reward}")
    if not step.done and not step.messages:
        raise ValueError("step returned no message, and the conversation is not done")
    return step


def _check_errors(environment: Environment, attempts: Sequence[Attempt], most: float) -> None:
    errors = [a for a in attempts if "error" in a.grade.extras]
    if len(errors) > most * len(attempts):
        raise GraderErrors(
            f"the environment {environment.name} raised in {len(errors)} of {len(attempts)} conversations, more than "
            f"the allowed share of {most:g}; first: {errors[0].grade.extras['error']}, on prompt "
            f"{errors[0].prompt.id}. Fix the environment, or raise max_grader_errors."
        )
