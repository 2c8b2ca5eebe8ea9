"""TURNS: laws of conversations with an environment. A run's own code samples and batches the conversations.

The batch is compared with the sampler's own record: each turn's prompt, tokens and log-probs as the sampler returned
them. That record is made before any code of the conversation or the batch runs.

    tokens      a batch trains exactly the tokens that were sampled, each after the tokens that the policy read
    stops       every stop token that the policy sampled has weight 1
    log-probs   they are those of the sampler, and those of the engine's current weights
    version     a row has the version that sampled it
    rendering   each turn's prompt is the chat template's rendering of the messages before it
    label       the declared author of an observation changes nothing
    content     the content of an observation changes the log-probs of later turns, and not those of earlier ones
    one turn    a conversation of one turn equals a rollout, bit for bit
    unrolled    if each turn is a separate row, the gradient is the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from earnest.engines.local import LocalEngine
from earnest.errors import SignalError
from earnest.models import SampleSpec
from earnest.objectives import DAPO
from earnest.rollouts import Attempt, Rollout, Segment, Trajectory, TurnSettings, collect
from earnest.rollouts.attempts import Sample
from earnest.rollouts.conversing import Conversations, converse
from earnest.rollouts.trajectory import Author
from earnest.rollouts.transcript import rendered
from earnest.signals import Batch
from earnest.signals.scorer import logprobs
from earnest.tasks import Environment, Prompt
from earnest_audit import Finding, Verdict
from earnest_audit.gradient import Gradient
from earnest_audit.law import Law


def prove_conversations(
    engine: LocalEngine,
    environment: Environment,
    prompts: Sequence[Prompt],
    n: int,
    spec: SampleSpec,
    turns: TurnSettings,
    *,
    sample: Sample | None = None,
) -> Verdict:
    """Sample ``n`` conversations of every prompt and check the laws on their batch. ``sample`` replaces the engine's
    sampler. The engine is unchanged afterwards."""
    talk = _Conversations(engine, environment, tuple(prompts), n, spec, turns, sample)
    return Verdict(tuple(talk.findings()))


@dataclass(frozen=True)
class _Turn:
    """A turn as the sampler returned it, and its place in the batch: a row and the position of its first target."""

    drawn: Rollout
    attempt: int
    number: int
    row: int
    first: int

    @property
    def targets(self) -> slice:
        return slice(self.first, self.first + len(self.drawn.tokens))


@dataclass(frozen=True)
class _Conversations:
    engine: LocalEngine
    environment: Environment
    prompts: tuple[Prompt, ...]
    n: int
    spec: SampleSpec
    turns: TurnSettings
    sample: Sample | None

    def findings(self) -> Iterator[Finding]:
        made = self._converse(self.turns)
        try:
            batch = self._batch(made)
        except SignalError as error:
            yield LAW.finding("tokens trained", "refused", "those that were sampled", False, str(error))
            return
        found = _places(batch, made)
        located = [turn for turn in found if turn is not None]
        yield from self._exact(batch, made, located)
        if len(located) == len(found):
            yield from self._logprobs(batch, located)
            yield self._rendering(made, located)
            yield self._label(batch, made)
            yield from self._content(batch, made, located)
            yield self._unrolled(batch, located)
        yield self._one_turn()

    def _converse(self, turns: TurnSettings) -> Conversations:
        given = (self.engine, self.environment, self.prompts, self.n, self.spec, turns)
        return converse(*given, sample=self.sample, max_errors=1.0)

    def _batch(self, made: Conversations) -> Batch:
        """The batch that a step would train on, made by the code that every step uses."""
        given = (self.engine, self.environment, self.prompts, self.n, self.spec)
        return collect(*given, turns=self.turns, made=made).batch

    def _exact(self, batch: Batch, made: Conversations, found: Sequence[_Turn]) -> Iterator[Finding]:
        sampled = [turn for turns in made.drawn.values() for turn in turns]
        wrong, drawn = len(sampled) - len(found), sum(len(turn.tokens) for turn in sampled)
        trained = batch.active.shape[0]
        measured = f"{wrong} of {len(sampled)} turns differ, {trained} tokens"
        why = (
            "The batch trains other tokens than the policy sampled, or after other tokens than it read: a turn was "
            "tokenized again, the mask is shifted, an observation is trained, or the history was changed."
        )
        same = not wrong and trained == drawn
        yield LAW.finding("tokens trained", measured, f"none, {drawn} tokens", same, why)
        ends = self.spec.ends(self.engine.policy)
        stops = [batch.weight[t.row, t.targets.stop - 1] for t in found if t.drawn.tokens[-1] in ends]
        kept, stopped = sum(bool(weight == 1) for weight in stops), sum(turn.tokens[-1] in ends for turn in sampled)
        why = "The policy sampled the end of a turn and is not trained on it, so it does not learn to stop."
        yield LAW.finding("stop tokens", f"{kept} with weight 1", f"{stopped}", kept == stopped, why)

    def _logprobs(self, batch: Batch, found: Sequence[_Turn]) -> Iterator[Finding]:
        assert batch.behaviour is not None
        behaviour = torch.zeros_like(batch.weight, dtype=batch.behaviour.dtype)
        behaviour[batch.row, batch.position] = batch.behaviour
        scores = torch.zeros_like(behaviour)
        scores[batch.row, batch.position] = self._score(batch).to(behaviour.dtype)
        drawn = [torch.tensor(turn.drawn.logprobs, dtype=behaviour.dtype, device=batch.device) for turn in found]
        off = max(float((behaviour[t.row, t.targets] - own).abs().max()) for t, own in zip(found, drawn, strict=True))
        why = "The log-probs in the batch are not those with which the tokens were sampled, so every ratio is wrong."
        yield LAW.agrees("log-probs of the sampler", off, 0.0, why)
        off = max(float((behaviour[t.row, t.targets] - scores[t.row, t.targets]).abs().max()) for t in found)
        why = (
            "The current weights give other log-probs than the batch has: it was sampled by another version, or after "
            "other tokens than those of its row."
        )
        subject = "log-probs of the weights"
        if self.spec.top_p < 1 or self.spec.top_k > 0:
            yield LAW.not_applicable(subject, "the sampler drew from a part of the vocabulary")
        else:
            yield LAW.agrees(subject, off, self._room, why)
        wrong = sum(int(batch.policy_version[turn.row]) > turn.drawn.policy_version for turn in found)
        known = not wrong and int(batch.policy_version.max()) <= self.engine.version
        measured, expected = f"{wrong} of {len(found)} turns under a newer one", f"none, at most {self.engine.version}"
        why = "A row has a version that did not sample it, so its age is wrong."
        yield LAW.finding("policy version", measured, expected, known, why)

    def _rendering(self, made: Conversations, found: Sequence[_Turn]) -> Finding:
        """Texts are compared without white space and undecodable characters, because templates trim contents."""
        policy, tools = self.engine.policy, self.environment.tools
        wrong = 0
        for turn in found:
            rollout = _trajectory(made.attempts[turn.attempt])
            opening = len(rollout.histories[0])
            places = [i for i, m in enumerate(rollout.messages) if i >= opening and m.get("role") == "assistant"]
            wanted = _letters(rendered(policy, rollout.messages[: places[turn.number]], tools))
            read = _letters(str(policy.tokenizer.decode(turn.drawn.prompt, skip_special_tokens=False)))
            wrong += not (read == wanted or read == _letters(str(policy.tokenizer.bos_token)) + wanted)
        why = (
            "The policy read another history than the chat template renders, so it would read another one in use: the "
            "template rewrites earlier turns (many remove the reasoning), and the conversation stayed in one row."
        )
        return LAW.finding("rendering", f"{wrong} of {len(found)} prompts differ", "none", not wrong, why)

    def _label(self, batch: Batch, made: Conversations) -> Finding:
        authors: Mapping[Author, Author] = {"tool": "user", "user": "template", "template": "tool"}

        def renamed(segment: Segment, _: bool) -> Segment:
            return replace(segment, author=authors.get(segment.author, segment.author))

        try:
            again = self._batch(_changed(made, renamed))
            same = _same(batch, again, "inputs", "targets", "weight", "behaviour", "advantages")
        except SignalError:
            same = False
        why = "The author of an observation changes what is trained; only tokens that the policy sampled may differ."
        return LAW.finding("label of an observation", "equal" if same else "different", "equal", same, why)

    def _content(self, batch: Batch, made: Conversations, found: Sequence[_Turn]) -> Iterator[Finding]:
        """The first token of a later turn does not count: it changes in a model that reads only one token, too."""
        subject = "content of an observation"
        following = [turn for turn in found if any(o.row == turn.row and o.first < turn.first for o in found)]
        later = [turn for turn in following if len(turn.drawn.tokens) > 1]
        if not later:
            yield LAW.not_applicable(subject, "no second turn in a row")
            return

        def turned(segment: Segment, observed: bool) -> Segment:
            if not observed or segment.author == "policy":
                return segment
            tokens = segment.tokens[1:] + segment.tokens[:1]
            other = tokens if tokens != segment.tokens else (segment.tokens[0] ^ 1, *segment.tokens[1:])
            return replace(segment, tokens=other)

        again = self._batch(_changed(made, turned))
        trained = _same(batch, again, "weight", "behaviour") and torch.equal(batch.token_target, again.token_target)
        change = torch.zeros_like(batch.weight)
        change[batch.row, batch.position] = (self._score(again) - self._score(batch)).abs().to(change.dtype)
        after = max(float(change[turn.row, turn.targets][1:].max()) for turn in later)
        before = max(float(change[turn.row, turn.targets].max()) for turn in found if turn not in following)
        measured, expected = f"later turns change by {after:.2g}", f"> {self._room:g}, and the same tokens trained"
        why = "Other observations do not change the later turns: the policy does not read them, or they are trained."
        yield LAW.finding(subject, measured, expected, after > self._room and trained, why)
        why = "A turn depends on what came after it: the row is shifted, or attention is not causal."
        yield LAW.agrees("turns before an observation", before, self._room, why, "change by {}")

    def _unrolled(self, batch: Batch, found: Sequence[_Turn]) -> Finding:
        worth = {turn.attempt: 1.0 + turn.attempt % 3 for turn in found}  # equal conversations must not cancel
        values = torch.zeros_like(batch.weight)
        for turn in found:
            values[turn.row, turn.targets] = worth[turn.attempt]
        unrolled = Batch.from_rows(
            [turn.drawn.prompt for turn in found],
            [turn.drawn.tokens for turn in found],
            behaviour=[turn.drawn.logprobs for turn in found],
            advantages=[worth[turn.attempt] for turn in found],
            temperature=batch.temperature,
            pad=self.engine.policy.pad_id,
            device=batch.device,
        )
        ours = Gradient(self.engine.gradients(batch.with_signals(advantages=batch.flatten(values)), DAPO()))
        theirs = Gradient(self.engine.gradients(unrolled, DAPO()))
        off = ours.minus(theirs).norm() / theirs.norm() if theirs.norm() else float("inf")
        why = "The gradient of a conversation is not the sum of its turns': positions, attention or weights are wrong."
        room = 1e-3 if self._exactly else 0.1
        return LAW.agrees("turns in rows of their own", off, room, why, "gradient off by {}")

    def _one_turn(self) -> Finding:
        subject = "one turn"
        if self.sample is not None:
            return LAW.not_applicable(subject, "a sampler elsewhere")
        made = self._converse(replace(self.turns, max_turns=1))
        first = [made.drawn[a.rollout.prompt_index, a.rollout.sample_index][0] for a in made.attempts]
        asked = [turn.prompt for turn in first[:: self.n]]
        if [turn.prompt for turn in first] != [prompt for prompt in asked for _ in range(self.n)]:
            return LAW.not_applicable(subject, "a prompt's conversations begin differently")
        plain = self.engine.sample(asked, self.n, self.spec)
        wrong = 0
        for a, b in zip(first, plain, strict=True):
            end = len(a.tokens) if a.finish == "length" else None  # a turn may have a lower token limit than a rollout
            wrong += (a.tokens, a.logprobs) != (b.tokens[:end], b.logprobs[:end])
        why = "A conversation of one turn is sampled differently from a rollout of the same prompt and seed."
        return LAW.finding(subject, f"{wrong} of {len(first)} differ from a rollout", "none", not wrong, why)

    @property
    def _exactly(self) -> bool:
        return self.engine.policy.dtype in (torch.float32, torch.float64)

    @property
    def _room(self) -> float:
        """The largest allowed difference between two log-probs of the same token and weights, in nats."""
        return 1e-3 if self._exactly else 0.25

    def _score(self, batch: Batch) -> Tensor:
        return logprobs(self.engine, batch, "live")


def _places(batch: Batch, made: Conversations) -> list[_Turn | None]:
    """The place of every sampled turn; None if no row of its conversation has its prompt and tokens, or if some of its
    tokens are not trained."""
    found: list[_Turn | None] = []
    row = 0
    for number, a in enumerate(made.attempts):
        end = row + len(a.rollout.rows)
        for k, turn in enumerate(made.drawn[a.rollout.prompt_index, a.rollout.sample_index]):
            while row < end and not _begins(batch, row, turn):
                row += 1
            placed = _Turn(turn, number, k, row, len(turn.prompt) - 1) if row < end else None
            found.append(placed if placed and bool((batch.weight[row, placed.targets] != 0).all()) else None)
            row = min(row, end - 1)
        row = end
    return found


def _begins(batch: Batch, row: int, turn: Rollout) -> bool:
    """Whether the row begins with the turn's prompt and tokens."""
    own = [*turn.prompt, *turn.tokens]
    return batch.whole_row(row)[: len(own)] == own


def _changed(made: Conversations, change: Callable[[Segment, bool], Segment]) -> Conversations:
    """The conversations with every segment changed. The flag is true after the policy's first turn in a row."""

    def row(segments: Sequence[Segment]) -> tuple[Segment, ...]:
        first = next(i for i, segment in enumerate(segments) if segment.author == "policy")
        return tuple(change(segment, i > first) for i, segment in enumerate(segments))

    attempts = [
        replace(a, rollout=replace(_trajectory(a), rows=tuple(map(row, _trajectory(a).rows)))) for a in made.attempts
    ]
    return Conversations(attempts, made.drawn)


def _trajectory(attempt: Attempt) -> Trajectory:
    assert isinstance(attempt.rollout, Trajectory)
    return attempt.rollout


def _same(a: Batch, b: Batch, *names: str) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def _letters(text: str) -> str:
    return "".join(text.split()).replace("\ufffd", "")


LAW = Law("TURNS", "conversations", __doc__, _Conversations.findings)
