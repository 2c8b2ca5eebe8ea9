"""What is trained on and graded: collators, chat templates, names and numbers, rewards of answers."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, takewhile, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earnest_audit.edits import Batch
from earnest_audit.errors import nearest
from earnest_audit.precision import rounding
from earnest_audit.restore import seeded
from earnest_audit.subjects.base import Subject, copied, equal, gap, largest
from earnest_audit.verdict import Finding

Messages = Sequence[Mapping[str, Any]]
Stage = Callable[[list[Any]], Mapping[str, Any]]
MISSING = torch.tensor(math.nan)  # in place of a column that a batch does not have: no number is equal to it


@dataclass
class Collator(Subject, name="collator"):
    """DATA: A collator, or a data stage, treats each example by itself, in order, and leaves its inputs alone.

    inputs       are not written into
    order        permuted examples give permuted rows, in every column
    purity       a row does not depend on the other examples, up to the padding
    again        the same examples give the same batch
    rows         there is a row for each example
    documents    a packed batch has one document per example, and it is what the example gives alone
    targets      exactly the declared tokens of an example are supervised in the batch
    columns      a column of the batch has what is declared of each example

    Needs: ``fn(examples)`` -> a dict of tensors [B, …] (a stage that returns rows: stack them); ``pads`` is column ->
    padding value: trailing and leading entries of that value are not compared. ``unpack(batch)`` cuts a packed batch
    into its documents, each a dict of columns. ``targets(example)`` are the supervised labels of an example, in order,
    in the column ``labels``, where others have ``ignore``. ``columns`` is column -> fn(example), what the example's row
    or document has to be. ``keeps(example)``: whether a filter keeps it; the rest is then about the kept ones.
    How: The examples are collated as they are, again, in another order, and each alone; floats are compared up to
    rounding. All calls but the second begin from a deep copy of ``fn`` that was never called.
    Exceptions: Stages that pack, sample, remove duplicates or draw for each row mix examples by design: rows=False
    leaves the inputs, the repetition and, with unpack, the documents, targets and columns.
    Detects: labels of the neighbouring row, a column that is sorted alone, an end token in the caller's own list,
    truncation that depends on the batch, TRL #5075, LLaMA-Factory #10283 and torchtitan #3130 (packed documents),
    torchtitan #2755 (a mask that is one token too long), a cache with too short a key
    """

    fn: Stage
    examples: Sequence[Any]
    pads: Mapping[str, float] = field(default_factory=dict)
    rows: bool = True
    seed: int = 0
    unpack: Callable[[Batch], Sequence[Batch]] | None = None
    targets: Callable[[Any], Sequence[int]] | None = None
    labels: str = "labels"
    ignore: int = -100
    columns: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    keeps: Callable[[Any], bool] | None = None

    def check(self) -> Iterator[Finding]:
        why = "The stage writes into its examples: the next epoch, and every other stage, gets other data."
        used = copied(self.fn)
        with seeded(self.seed):
            given, unchanged = self.untouched(used, {"examples": list(self.examples)}, why)
        yield unchanged
        batch, again = _tensors(given), self._run(self.examples, used)
        for unknown in set(self.pads) - set(batch):  # misspelt; another stage's is no error
            if (hint := nearest(unknown, set(batch) - set(self.pads))).startswith("did"):
                raise self.error("pads", f"the batch has no column {unknown!r}, {hint}")
        differ = [k for k in batch if k not in again or _off(again[k], batch[k]) > 0]
        more = ": the same examples and seed give another batch: a state of the last call is left."
        yield self.none("the same examples again", differ, f"{len(differ)} of {len(batch)} columns differ", more)
        kept = [example for example in self.examples if self.keeps is None or self.keeps(example)]
        apart = self.rows or self.unpack is not None
        alone = [(example, self._run([example]) if apart else {}) for example in kept]
        if self.unpack is not None:
            yield self._documents(self.unpack, alone)
        if self.targets is not None:
            more = "other tokens are supervised than declared: a mask is off by one, without an end, or with a prompt."
            yield self._declared("supervised tokens", self.labels, batch, alone, more, self._tokens)
        for k in self.columns:
            more = f"{k} is not what the example has: a flag that is dropped, a default, another field."
            yield self._declared(f"column {k}", k, batch, alone, more, partial(self._value, k))
        sizes = {k: len(v) for k, v in batch.items() if v.ndim > 0}
        columns, most = [k for k, size in sizes.items() if size == len(kept)], max(sizes.values(), default=0)
        if not self.rows or not columns or len(kept) < 2:
            measured = f"{len(kept)} examples, {most} rows" if self.rows else "rows are not examples"
            lost = self.rows and sizes and not columns and (most < len(kept) or self.keeps is not None)
            why = "Examples are lost, or not dropped. Filters declare keeps=…, packing and sampling stages rows=False."
            yield self.finding("rows", measured, "a row per example", False if lost else "not applicable", why)
            return
        turned = self._run(list(self.examples)[::-1])  # not a rotation, which a shift by one row would survive
        rows = {k: [*turned.get(k, [])][::-1] for k in columns}
        more = ": permuted examples do not give permuted rows, so columns of one row come from different examples."
        yield self._same_rows("permuted examples", rows, batch, more)
        rows = {k: [row for _, one in alone for row in one.get(k, [])[:1]] for k in columns}
        more = ": an example gives another row alone: a statistic of the batch, or another example, is in it."
        yield self._same_rows("each example alone", rows, batch, more)

    def _same_rows(self, subject: str, rows: Mapping[str, list[Tensor]], batch: Batch, more: str) -> Finding:
        pairs = {k: zip_longest(rows[k], batch[k], fillvalue=MISSING) for k in rows}
        off = {k: max(_off(self._real(k, a), self._real(k, b)) for a, b in pairs[k]) for k in rows}
        wrong = [k for k in rows if off[k] > rounding(batch[k])]
        if wrong and all(k not in self.pads and _shorter(rows[k], batch[k]) for k in wrong):
            return self.not_declared(subject, f"pads={{column: its padding value}}, for {', '.join(wrong)},")
        floats = max((by for by in off.values() if 0 < by < math.inf), default=0.0)
        by = f", floats by up to {floats:.2g}" if floats else ""
        return self.none(subject, wrong, f"{len(wrong)} of {len(rows)} columns differ{by}", more)

    def _documents(self, unpack: Callable[[Batch], Sequence[Batch]], alone: Sequence[tuple[Any, Batch]]) -> Finding:
        found = [_tensors(document) for document in unpack(self._run(self.examples))]
        each = [[_tensors(document) for document in unpack(one)] for _, one in alone]
        lost = sum(not any(_alike(document, other) for other in found) for own in each for document in own)
        one = len(found) == len(each) and all(len(own) == 1 for own in each)
        measured = f"{len(found)} documents of {len(alone)} examples, {lost} of them not as they are alone"
        why = "A packed example is another document than alone: positions go on, a boundary is lost, or it is split."
        return self.finding("documents", measured, "one per example, each as it is alone", one and lost == 0, why)

    def _declared(self, subject: str, column: str, batch: Batch, alone: Sequence[tuple[Any, Batch]], meaning: str,
                  wrong: Callable[[Tensor, Any], str]) -> Finding:  # fmt: skip
        """``wrong``: what is wrong with this column of an example, in its row, or in its document alone."""
        found: Any = batch.get(column, MISSING.expand(len(alone)))
        if self.unpack is not None:
            parts = [{**one, **next(iter(self.unpack(one)), {})} for _, one in alone]
            found = [torch.as_tensor(part.get(column, MISSING)) for part in parts]
        elif not self.rows or not found.ndim or len(found) != len(alone):
            return self.not_declared(subject, "unpack=…, which finds each example in the batch,")
        each = [wrong(own, example) for own, (example, _) in zip(found, alone, strict=True)]
        odd = [f"example {number} {how}" for number, how in enumerate(each) if how]
        return self.none(subject, odd, f"{len(odd)} of {len(each)} examples differ", f": {meaning}")

    def _value(self, column: str, row: Tensor, example: Any) -> str:
        wanted = torch.as_tensor(self.columns[column](example))
        return "differs" if _off(self._real(column, row), self._real(column, wanted)) > rounding(row, wanted) else ""

    def _tokens(self, row: Tensor, example: Any) -> str:
        found, wanted = row[row != self.ignore].tolist(), [int(t) for t in (self.targets or list)(example)]
        odd = {"lacks": Counter(wanted) - Counter(found), "also has": Counter(found) - Counter(wanted)}
        differ = [f"{word} {', '.join(map(str, [*tokens.elements()][:3]))}" for word, tokens in odd.items() if tokens]
        return " and ".join(differ) or ("" if found == wanted else "has another order")

    def _run(self, examples: Sequence[Any], fn: Stage | None = None) -> dict[str, Tensor]:
        with seeded(self.seed):
            return _tensors((fn or copied(self.fn))(copy.deepcopy(list(examples))))

    def _real(self, key: str, row: Tensor) -> Tensor:
        """A row without its padding in front and at the end."""
        if key not in self.pads or not row.ndim or not row.numel():
            return row
        places = (row != self.pads[key]).reshape(len(row), -1).any(-1).nonzero()[:, 0]
        return row[int(places[0]) : int(places[-1]) + 1] if len(places) else row[:0]


def _tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    arrays = {k: torch.as_tensor(v) for k, v in batch.items() if isinstance(v, np.ndarray) and v.dtype.kind in "biuf"}
    return {k: v.clone() for k, v in {**batch, **arrays}.items() if isinstance(v, Tensor)}


def _shorter(rows: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether rows begin or end as they do in the whole batch, and lack what may be padding."""
    if whole.ndim < 2 or len(rows) != len(whole) or all(len(row) == whole.shape[1] for row in rows):
        return False
    cuts = [(row, full[: len(row)], full[len(full) - len(row) :]) for row, full in zip(rows, whole, strict=True)]
    return all(equal(row, front) or equal(row, back) for row, front, back in cuts)


def _alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two documents are the same, floats up to rounding."""
    return a.keys() == b.keys() and all(_off(a[k], b[k]) <= rounding(a[k], b[k]) for k in a)


def _off(a: Tensor, b: Tensor) -> float:
    """By how much two tensors differ, relative to an entry or, where that is less, to 1 or the largest; NaN is equal
    to NaN. Infinite for another shape, and for other whole numbers."""
    b = b.to(a.device)
    if a.shape != b.shape or not (a.is_floating_point() or b.is_floating_point()):
        return 0.0 if a.shape == b.shape and bool((a == b).all()) else math.inf
    a, b = (t.double()[~(a.isnan() & b.isnan())] for t in (a, b))
    size = torch.maximum(a.abs(), b.abs())
    off = largest(gap(a, b) / size.clamp_min(max(1e-300, min(1.0, largest(size[size.isfinite()])))))
    return math.inf if math.isnan(off) else off


@dataclass
class ChatTemplate(Subject, name="chat template"):
    """TEMPLATE: What is sampled from is a prefix of what is trained on, and exactly the assistant's words are
    supervised.

    prefix      prompt(messages up to an answer) is the beginning of tokens(messages)
    supervised  another text of the user or the system leaves the supervised tokens as they are; another answer does not
    generated   what stands between the messages before an answer and its words (a generation prompt) is not supervised
    ends        the end that follows the words of every answer is supervised, and that of no other message
    inputs      the messages are not written into
    untrained   answers that are declared not to be trained are not supervised, and neither are their ends

    Needs: ``tokens(messages)`` gives the ids that are trained on and which of them are supervised (1 or 0 each);
    ``prompt(messages)`` the ids that an answer is sampled from; ``end`` is the id that ends an answer. ``trained`` are
    the places in ``messages`` of the answers that are supervised, where that is not all of them.
    How: A conversation is rendered whole, up to each answer, and with one other text at a time.
    Exceptions: Templates that rewrite earlier turns (remove reasoning) are no prefix by design: prefix=False.
    Warns: (an answer without an end, where others have one) the next message may begin with it (GLM); tool calls may
    have another one.
    Detects: Megatron-Bridge #3359, marin #7237 and TRL #4201 (no generation marks: everything or nothing is
    supervised), a system prompt or an end of text on one side only, an end of turn that is masked
    """

    tokens: Callable[[list[Mapping[str, Any]]], tuple[Sequence[int], Sequence[int]]]
    prompt: Callable[[list[Mapping[str, Any]]], Sequence[int]]
    messages: Messages
    end: int | None = None
    prefix: bool = True
    trained: Sequence[int] | None = None

    def check(self) -> Iterator[Finding]:
        messages = list(self.messages)
        why = "The template writes into the messages: the next use gets others."
        given, unchanged = self.untouched(self.tokens, {"messages": messages}, why)
        yield unchanged
        ids, on = list(given[0]), [bool(each) for each in given[1]]
        answers, taught = [i for i, m in enumerate(messages) if m["role"] == "assistant"], self._taught(messages)
        share = f"{len(taught)} of {len(ids)} tokens"
        why = "Nothing is supervised, or everything is, the prompt included: the template marks no assistant span."
        yield self.finding("supervised share", share, "some, not all", 0 < len(taught) < len(ids), why)
        if self.prefix:
            yield from (self._begins(ids, i) for i in answers)
            supervised = [str(i) for i in answers if any(on[self._rendered(ids, i) : len(self._prompt(i))])]
            more = ": tokens between the last message and this answer are supervised, which the policy never samples."
            measured = f"{len(supervised)} of {len(answers)} are supervised"
            yield self.none("generation prompts", supervised, measured, more)
        answers = [i for i in answers if self.trained is None or i in self.trained]
        others = [i for i in range(len(messages)) if i not in answers]
        moved = [str(i) for i in others if any(self._taught(_other(messages, i, f)) != taught for f in (False, True))]
        more = ": other words of a user, the system or an answer that is not trained change what is supervised."
        yield self.none("words of others", moved, f"{len(moved)} of {len(others)} messages are supervised", more)
        unsupervised = [str(i) for i in answers if self._taught(_other(messages, i)) == taught]
        more = ": another answer leaves the supervised tokens as they are: this answer is not supervised."
        measured = f"{len(unsupervised)} of {len(answers)} answers are not"
        yield self.none("the assistant's words", unsupervised, measured, more)
        if self.trained is not None and answers:
            yield self._without_history(answers[0], taught)
        if self.end is None:
            yield self.not_declared("ends of answers", "end=…, the id that ends an answer,")
            return
        ends = self._ends(messages)
        off = [i for i in answers if i in ends and not on[ends[i][0]]]
        also = [i for i in ends if i not in answers and any(on[place] for place in ends[i])]
        without = [i for i in answers if i not in ends]
        odd = (("not of", off), ("also of", also), ("there is none of", without))
        said = [f"{what} {', '.join(map(str, which))}" for what, which in odd if which]
        measured = "; ".join([f"{len(answers) - len(off) - len(without)} of {len(answers)} supervised", *said])
        why = "An answer's end is not supervised, so the model does not learn to stop; or another message's end is."
        if self.end not in ids:
            why = f"The id {self.end} is nowhere in the conversation: another one ends answers, or none."
        row = self.finding("ends of answers", measured, "all, and no other", not said, why)
        if without and messages[-1]["role"] == "assistant":  # the next message may begin with the end
            ends |= self._ends([*messages, {"role": "user", "content": "7 x"}])
        yield self.law.doubtful(row) if not off and not also and any(i in ends for i in answers) else row

    def _ends(self, messages: Messages) -> dict[int, list[int]]:
        """Message -> the places of ends after its words, up to the last words of the next one; none: no key. Where its
        words end is seen when more are added."""
        ids, stops = self._given(messages)[0], []
        for i in range(len(messages)):
            other = self._given(_other(messages, i))[0]
            after = takewhile(lambda pair: pair[0] == pair[1], zip(ids[::-1], other[::-1], strict=False))
            stops += [(len(ids) - sum(1 for _ in after), i)] if other != ids else []
        parts = pairwise([*sorted(stops), (len(ids), -1)])
        return {i: on for (at, i), (to, _) in parts if (on := [k for k in range(at, to) if ids[k] == self.end])}

    def _prompt(self, answer: int) -> list[int]:
        """What this answer is sampled from."""
        return list(self.prompt(copy.deepcopy(list(self.messages[:answer]))))

    def _rendered(self, ids: list[int], answer: int) -> int:
        """Where the messages before this answer end and its generation prompt begins; the end if they are refused."""
        try:
            before = self._given(self.messages[:answer])[0]
        except Exception:
            return len(ids)
        return len(before) if ids[: len(before)] == before else len(ids)

    def _begins(self, ids: list[int], answer: int) -> Finding:
        prompt = self._prompt(answer)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))
        measured = f"{common} of its {len(prompt)} ids begin the conversation"
        why = "Answers are sampled after another text: a system or generation prompt, or a space, is on one side only."
        return self.finding(f"the prompt of message {answer}", measured, "all of them", common == len(prompt), why)

    def _without_history(self, first: int, taught: list[int]) -> Finding:
        """What is supervised where everything before the exchange of the first trained answer is left out."""
        start = max((i for i in range(first) if self.messages[i]["role"] == "user"), default=0)
        alone = self._taught([*(m for m in self.messages[:start] if m["role"] == "system"), *self.messages[start:]])
        why = "Something in turns that are not trained is supervised, such as the end of an earlier answer."
        measured = f"{len(taught)} tokens are supervised, {len(alone)} without those turns"
        return self.finding("turns that are not trained", measured, "the same", alone == taught, why)

    def _taught(self, messages: Messages) -> list[int]:
        """The supervised tokens of a conversation."""
        return [t for t, on in zip(*self._given(messages), strict=True) if on]

    def _given(self, messages: Messages) -> tuple[list[int], list[int]]:
        ids, mask = self.tokens(copy.deepcopy(list(messages)))
        return list(ids), list(mask)


def _other(messages: Messages, changed: int, front: bool = False) -> list[Mapping[str, Any]]:
    """The messages, one with more words."""
    words = messages[changed]["content"]
    more = {"content": f"7 x {words}" if front else f"{words} 7 x"}
    return [{**m, **more} if i == changed else m for i, m in enumerate(messages)]


@dataclass
class Census(Subject, name="census"):
    """CENSUS: What exists is what was requested, no more and no less (adapted layers, loaded keys, logged names).

    Needs: ``wanted`` and ``found`` are names, or mappings of names to numbers (the rows of a source); ``what`` names
    their kind. ``once=True`` where no name may be found twice: shards, parts that make up a whole.
    How: Both sets are compared, and their numbers where there are any: whole ones exactly, others up to 1e-5.
    Exceptions: Names that differ by a wrapper's prefix must be brought to one form first.
    Detects: a greedy pattern that reads an expert's index as the layer's; a target list that matches nothing
    """

    wanted: Iterable[str] | Mapping[str, float]
    found: Iterable[str] | Mapping[str, float]
    what: str = "adapted modules"
    once: bool = False

    def check(self) -> Iterator[Finding]:
        listed = list(self.found)  # once: a generator can be read only once
        wanted, found = set(self.wanted), set(listed)
        missing, extra = sorted(wanted - found), sorted(found - wanted)
        odd = ", ".join([*missing[:3], *(f"{name} (not requested)" for name in extra[:3])])
        why = f"{odd}: a pattern, a filter or a cut takes another part."
        measured, same = f"{len(missing)} missing, {len(extra)} not requested", bool(wanted) and wanted == found
        yield self.finding(self.what, measured, "exactly what was requested", same, why)
        mine, theirs = _numbers(self.wanted), _numbers(self.found)
        if mine is not None and theirs is not None:
            both = {n: (mine[n], theirs[n]) for n in mine if n in theirs}
            room = {n: 1e-5 if a % 1 or b % 1 else 0.0 for n, (a, b) in both.items()}
            off = [f"{n} is {b}, not {a}" for n, (a, b) in both.items() if not math.isclose(a, b, rel_tol=room[n])]
            more = ": something is lost, counted twice, or another's."
            yield self.none(f"{self.what}, how many", off, f"{len(off)} of {len(both)} differ", more)
        if self.once:
            twice = sorted(n for n, k in Counter(listed).items() if k > 1)
            more = ": two parts hold the same, or one thing is done twice."
            yield self.none(f"{self.what}, each once", twice, f"{len(twice)} found more than once", more)


def _numbers(names: Iterable[str] | Mapping[str, float]) -> Mapping[str, float] | None:
    return names if isinstance(names, Mapping) and all(isinstance(v, int | float) for v in names.values()) else None


@dataclass
class Grader(Subject, name="grader"):
    """GRADER: A grader gives every right answer more than every wrong one, nothing for no answer, and the same again.

    order     right > wrong, for all that are given
    nothing   an empty answer, blanks or the question again are worth no more than a wrong answer
    again     the same answer is worth the same a second time, and after other answers
    finite    every reward is a finite number

    Needs: ``grade(answer)`` is the reward of an answer to one ``question``; ``right`` and ``wrong`` are examples.
    How: All answers are graded, then again in reverse order.
    Exceptions: A grader that is random by design (a sampled judge) declares repeatable=False.
    Detects: an empty answer with a format reward, substring matches, state between calls, NaN for what is not parsed
    """

    grade: Callable[[str], float]
    right: Sequence[str]
    wrong: Sequence[str]
    question: str | None = None
    repeatable: bool = True

    def check(self) -> Iterator[Finding]:
        nothing = ["", "   "] if self.question is None else ["", "   ", self.question]
        answers = [*self.right, *self.wrong, *nothing]
        found = {a: float(self.grade(a)) for a in answers}
        odd = [repr(a) for a in answers if not math.isfinite(found[a])]
        yield self.none("finite", odd, f"{len(odd)} of {len(answers)} rewards are not", ": no number comes back.")
        best, least = max(found[a] for a in self.wrong), min(found[a] for a in self.right)
        why = "A wrong answer is worth as much as a right one, or more: a sign, a loose match, or a reward for length."
        yield self.finding("right above wrong", f"{least:.3g} against {best:.3g}", "above", least > best, why)
        paid = [repr(a) for a in nothing if not found[a] <= best]
        more = " is worth more than a wrong answer, and is none."
        yield self.none("no answer", paid, f"{len(paid)} of {len(nothing)} are paid", more)
        if not self.repeatable:
            yield self.not_applicable("again", "random by declaration")
            return
        moved = [repr(a) for a in reversed(answers) if float(self.grade(a)) != found[a]]
        more = " is worth something else the second time: the grader draws, or keeps something of other answers."
        yield self.none("again", moved, f"{len(moved)} of {len(answers)} rewards differ", more)
