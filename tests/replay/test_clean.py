"""Filters by hand, by law, and against data-juicer's own operators on the same records."""

from __future__ import annotations

import json
import os
import string
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earnest.replay.clean import backend_of, clean
from earnest.replay.errors import CleaningError
from earnest.replay.filters import (
    BuiltIn,
    FilterResult,
    Op,
    character_repetition,
    jaccard,
    near_duplicates,
    shingles,
    special_share,
    word_repetition,
    words,
)
from earnest.replay.juicer import lsh_bands
from earnest.replay.leakage import Leakage, heldout_texts
from tests.environments import ROOT, python_of
from tests.replay.records import pair

STORY = "The fox went down to the river at night and found that nobody was there but the moon."
OTHER = "A market opens early, and whoever comes late will find only bread and a few old apples."

RECORDS = [
    STORY,
    OTHER,
    "ok",  # too short
    "1234567890 ++++ ---- 99 %% 11 @@ 22",  # special characters
    "la la la la la la la la la la la la la la la la la la la la",  # repetition
    STORY,  # an exact duplicate
    f"  {OTHER}\n",  # exact, blanks apart
    STORY.replace("nobody", "no body"),  # near
    "Rain in the mountains feeds every brook of the valley, so the mill can work until the autumn.",
    "Ärger, Größe und Übermut: drei Wörter mit Umlauten, die jeder Filter als Buchstaben zählen soll.",
    "Ein Satz mit „Anführungszeichen“ – und einem Gedankenstrich … sowie 😀 einem Gesicht darin.",
    "word " * 30,
    "A\u3000line of text\u3000with wide blanks (U+3000) between some of its words, as in Japanese sentences.",
]
RECIPE = [
    Op("text_length", settings={"min": 10, "max": 5000}),
    Op("words", settings={"min": 3}),
    Op("special_characters", settings={"max": 0.4}),
    Op("character_repetition", settings={"n": 10, "max": 0.3}),
    Op("word_repetition", settings={"n": 3, "max": 0.4}),
    Op("exact_duplicates", "chosen"),
    Op("near_duplicates", "chosen", {"threshold": 0.7}),
]


SHORT = ["yes", "no", "four", STORY, "yes"]
NEAR = Op("near_duplicates", settings={"threshold": 0.7, "n": 5})


@pytest.fixture(scope="module")
def juicer() -> list[dict[str, Any]]:
    """data-juicer's verdicts on both sets of texts, in its own environment, offline."""
    jobs = [{"ops": [asdict(op) for op in ops], "texts": texts} for ops, texts in ((RECIPE, RECORDS), ([NEAR], SHORT))]
    done = in_juicer(str(Path(__file__).with_name("juicer_answers.py")), given=json.dumps(jobs))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def in_juicer(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    own = {name: os.environ[name] for name in ("PATH", "HOME")}
    return subprocess.run(
        [python_of("juicer"), *words],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env={
            **own,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'earnest-audit' / 'src'}",
            "OMP_NUM_THREADS": "1",
        },
    )


@pytest.mark.integration
def test_data_juicer_and_the_built_in_filters_keep_the_same_records(juicer: list[dict[str, Any]]) -> None:
    """The values too, to the last digit, on every record; so the twins agree because they compute the same."""
    theirs = juicer[0]["verdicts"]
    left = list(range(len(RECORDS)))
    for op in RECIPE:
        left = [i for i, v in zip(left, BuiltIn().judge(op, [RECORDS[i] for i in left]), strict=True) if v.keep]
    assert left == juicer[0]["survivors"] == [0, 1, 8, 9, 10, 12]
    for number, op in enumerate(RECIPE):
        ours = BuiltIn().judge(op, RECORDS)
        assert [v.keep for v in ours] == [keep for keep, _ in theirs[number]], op.op
        if not op.op.endswith("duplicates"):
            assert [v.value for v in ours] == pytest.approx([value for _, value in theirs[number]]), op.op
    # every filter drops something, or the comparison would say nothing about it
    assert all(any(not keep for keep, _ in verdicts) for verdicts in theirs)


@pytest.mark.integration
def test_short_texts_are_no_duplicates_of_each_other_in_either(juicer: list[dict[str, Any]]) -> None:
    """data-juicer's MinHash has no shingle of a text below its window, and would take all such texts for one."""
    assert [keep for keep, _ in juicer[1]["verdicts"][0]] == [True] * 5
    assert [v.keep for v in BuiltIn().judge(NEAR, SHORT)] == [True, True, True, True, False]


@pytest.mark.integration
def test_nothing_is_installed_while_it_runs() -> None:
    """What data-juicer misses is refused in words; its own habit would be a download."""
    script = (
        "from earnest.replay.juicer import Juicer\n"
        "Juicer()\n"
        "from data_juicer.utils.lazy_loader import LazyLoader\n"
        "LazyLoader('scipy.integrate').quad\n"
    )
    done = in_juicer("-c", script)
    assert done.returncode == 1
    assert "CleaningError: data-juicer tries to install" in done.stderr
    assert in_juicer("-c", "import scipy").returncode == 1, "and it is still not there"


def test_without_data_juicer_the_message_has_the_install_line() -> None:
    assert backend_of("auto").name == backend_of("built-in").name == "built-in"
    with pytest.raises(Exception, match=r'pip install "earnest\[juicer\]"'):
        backend_of("data-juicer")


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_measures_by_hand() -> None:
    assert words('He said: "two words" – 3 times!\n\tok') == ["He", "said", "two", "words", "times", "ok"]
    assert words("wide\u3000blanks divide no words, as in data-juicer")[0] == "wide\u3000blanks"
    assert special_share("ab 1") == 0.5
    assert special_share("") == 0.0
    # n = 2 of "abab": ab, ba, ab; distinct 2, √2 → 1, repeated 1: the 2 of "ab" among 3
    assert character_repetition("abab", 2) == pytest.approx(2 / 3)
    assert character_repetition("abc", 5) == 0.0
    # "a b a b c", n = 2: ab, ba, ab, bc: two of four occur more than once
    assert word_repetition("a b A b, c", 2) == pytest.approx(2 / 4)


def test_near_duplicates_by_hand() -> None:
    """Shingles of length 2: abcd = {ab, bc, cd}, abce = {ab, bc, ce}: 2 shared of 4."""
    assert jaccard(shingles("abcd", 2), shingles("abce", 2)) == pytest.approx(2 / 4)
    assert [v.keep for v in near_duplicates(["abcd", "abce", "wxyz"], 2, 0.5)] == [True, False, True]
    assert [v.keep for v in near_duplicates(["abcd", "abce", "wxyz"], 2, 0.51)] == [True, True, True]
    assert near_duplicates(["abcd", "abce"], 2, 0.5)[1] == FilterResult(False, 0.5, 0)


short = st.text(alphabet="abc ", min_size=0, max_size=12)


@given(texts=st.lists(short, min_size=1, max_size=9), threshold=st.sampled_from([0.2, 0.5, 0.8, 1.0]))
def test_prefix_filtering_finds_what_comparing_all_pairs_finds(texts: list[str], threshold: float) -> None:
    """The slow twin: every pair is compared, clusters are merged until nothing changes."""
    sets = [shingles(text, 3) for text in texts]
    cluster = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if jaccard(sets[i], sets[j]) >= threshold:
                a, b = sorted((cluster[i], cluster[j]))
                cluster = [a if c == b else c for c in cluster]
    assert [v.keep for v in near_duplicates(texts, 3, threshold)] == [c == i for i, c in enumerate(cluster)]


@given(st.text(alphabet=string.printable, max_size=60), st.integers(1, 6))
def test_measures_stay_in_their_range(text: str, n: int) -> None:
    for value in (special_share(text), character_repetition(text, n), word_repetition(text, n)):
        assert 0.0 <= value <= 1.0
    assert len(words(text)) <= len(text.split())


# --- the pipeline -----------------------------------------------------------------------------------------------------


def test_a_filter_sees_what_the_one_before_left_and_keeps_examples() -> None:
    pairs = [pair("x"), pair("a good long answer"), pair("a good long answer"), pair("another good answer")]
    found = clean(pairs, [Op("text_length", settings={"min": 5}), Op("exact_duplicates", "pair")])
    assert [p.chosen["content"] for p in found.pairs] == ["a good long answer", "another good answer"]
    first, second = found.steps
    assert (first.judged, first.dropped, second.judged, second.dropped) == (4, 1, 3, 1)
    assert first.examples[0].text == "x" and first.examples[0].value == 1.0
    assert second.examples[0].twin == pairs[1].id


def test_an_answer_that_is_a_tool_call_is_not_judged_by_its_text() -> None:
    from tests.replay.records import call

    calls = [pair("plain text here", trace="a"), pair("", trace="b")]
    calls[1] = calls[1].__class__(**{**calls[1].__dict__, "chosen": call("clock", city="Paris")})
    found = clean(calls, [Op("words", settings={"min": 2})])
    assert len(found.pairs) == 2 and found.steps[0].unjudged == 1


def test_a_filter_that_drops_everything_stops_the_job() -> None:
    with pytest.raises(CleaningError, match=r"text_length on chosen .* dropped all 2 pairs .* 'short' \(5\)"):
        clean([pair("short"), pair("tiny")], [Op("text_length", settings={"min": 100})])


def test_an_op_that_raises_stops_the_job() -> None:
    class Broken:
        name = "broken"

        def judge(self, op: Op, texts: Sequence[str]) -> list[FilterResult]:
            raise RuntimeError("no memory")

    class Short:
        name = "short"

        def judge(self, op: Op, texts: Sequence[str]) -> list[FilterResult]:
            return []

    op = Op("words", settings={"min": 1})
    with pytest.raises(CleaningError, match=r"words \(broken\) raised RuntimeError: no memory"):
        clean([pair("text")], [op], Broken())
    with pytest.raises(CleaningError, match=r"gave 0 verdicts on 1 texts"):
        clean([pair("text")], [op], Short())


@pytest.mark.parametrize(
    ("op", "settings", "why"),
    [
        ("wordz", {}, "filter 'wordz' is unknown: did you mean 'words'"),
        ("words", {}, "neither min nor max"),
        ("words", {"min": 3, "max": 2}, "min 3 is above max 2"),
        ("words", {"min": 3, "n": 2}, "has no setting 'n'"),
        ("near_duplicates", {"threshold": 0}, "threshold 0 must be above 0"),
        ("character_repetition", {"n": 0, "max": 1}, "n is 0"),
    ],
)
def test_a_filter_that_could_not_be_obeyed_is_refused(op: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(CleaningError, match=why):
        Op(op, settings=settings)
    with pytest.raises(CleaningError, match="field 'answer' is unknown"):
        Op("words", "answer", {"min": 1})
    assert Op("words", settings={"min": 3, "max": 3}).low == 3, "exactly three words"


# --- leakage ----------------------------------------------------------------------------------------------------------


def test_leakage_by_hand() -> None:
    """Four-grams of 'a b c d e f': 3, of which the held-out text has one (b c d e)."""
    held = Leakage.of(["x b c d e y", "sort 3152"], n=4, max_share=0.3)
    assert held.share("A b c d e, f") == pytest.approx(1 / 3)
    assert held.share("Sort 3152.") == 1.0, "shorter than n: compared as a whole"
    assert held.share("Sort 1235.") == 0.0, "digits are part of a question"
    pairs = [pair("answer one", prompt="Sort 3152."), pair("answer two", prompt="Sort 1235.")]
    found = clean(pairs, [], leakage=held)
    assert [p.text("prompt") for p in found.pairs] == ["Sort 1235."]
    assert found.steps[0].op == "leakage" and found.steps[0].dropped == 1


def test_heldout_sets(tmp_path: Path) -> None:
    assert len(heldout_texts("task:sort")) > 100
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"messages": [{"role": "user", "content": "y"}]}\n')
    assert heldout_texts(str(tmp_path / "a.txt")) == ["one", "two"]
    assert heldout_texts(str(tmp_path / "b.jsonl")) == ["x", "y"]
    (tmp_path / "b.jsonl").write_text('{"nothing": 1}\n')
    with pytest.raises(CleaningError, match="line 1"):
        heldout_texts(str(tmp_path / "b.jsonl"))
    with pytest.raises(CleaningError, match="neither a file nor task:NAME"):
        heldout_texts("nowhere.txt")
    with pytest.raises(CleaningError, match="no text"):
        Leakage.of([])


def test_bands_put_the_steep_point_at_the_threshold() -> None:
    for threshold in (0.5, 0.7, 0.8, 0.9):
        bands, rows = lsh_bands(threshold, 256)
        assert bands * rows <= 256 and (1 / bands) ** (1 / rows) == pytest.approx(threshold, abs=0.04)


def test_a_held_out_question_inside_a_longer_conversation_is_found() -> None:
    """Of the conversation's own n-grams few are held out; of the question's, all are."""
    question = "How many digits of 9041 are larger than the digit before them"
    held = Leakage.of([question, "sort 3 1 2", "hello"], n=6, max_share=0.5)
    long = f"{STORY} {OTHER} By the way: {question}? {STORY}"
    assert held.share(long) == 1.0 and held.share(f"{STORY} {OTHER}") == 0.0
    assert held.share(f"{STORY} Please sort 3 1 2. {OTHER}") == 1.0, "a text shorter than n, as a whole"
    assert held.share(f"{STORY} Please sort 3 1 4. {OTHER}") == 0.0
    assert held.share(f"hello {STORY}") == 0.0, "a single word is no question"


def test_the_default_filters_keep_answers_that_are_numbers() -> None:
    import yaml

    from earnest import replay

    default = yaml.safe_load((Path(str(replay.__file__)).parent / "default.yaml").read_text())
    ops = [Op(f.pop("op"), f.pop("field"), f) for f in default["clean"]]
    answers = ["42", "3.14", "1 2 3 5", "x = -7", "12:30"]
    pairs = [pair(answer, "no idea", f"question {i}", trace=f"t{i}") for i, answer in enumerate(answers)]
    assert len(clean(pairs, ops).pairs) == len(answers)


def test_a_held_out_file_is_read_by_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "held.jsonl"
    path.write_text(json.dumps({"text": "one\u2028line"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert heldout_texts(str(path)) == ["one\u2028line"]
    path.write_bytes(b"\xff\n")
    with pytest.raises(CleaningError, match="is not UTF-8"):
        heldout_texts(str(path))
