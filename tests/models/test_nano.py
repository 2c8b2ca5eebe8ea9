"""The embedded model: it loads like any other, its tokenizer loses nothing, its template masks what it should, and it
behaves as its model card states."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from earnest import data
from earnest.tasks.puzzles import PUZZLES
from scripts.nano import card, score, train
from scripts.nano.train import FOLDER

TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does the lamp cost?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c0", "content": "12 coins"},
    {"role": "assistant", "content": "The lamp costs 12 coins."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Gladly."},
]


@pytest.fixture(scope="module")
def nano() -> score.Nano:
    return score.Nano(FOLDER)


def test_it_is_a_small_llama_in_float32(nano: score.Nano) -> None:
    assert isinstance(nano.model, LlamaForCausalLM)
    assert sum(p.numel() for p in nano.model.parameters()) <= 2_000_000
    assert sum(f.stat().st_size for f in FOLDER.iterdir() if f.is_file()) <= 8_000_000
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in sorted(file.keys())]
    assert {t.dtype for t in tensors} == {torch.float32}
    assert all(torch.isfinite(t).all() for t in tensors)
    assert {p.dtype for p in nano.model.parameters()} == {torch.float32}
    assert not list(FOLDER.glob("*.bin"))


def test_its_version_is_the_same_everywhere() -> None:
    version = (FOLDER / "VERSION").read_text().strip()
    assert version == train.VERSION == AutoConfig.from_pretrained(FOLDER).earnest_version
    record = json.loads((FOLDER / "training.json").read_text())
    assert record["version"] == version
    assert record["sha256"] == train.digest(FOLDER)
    assert version in (FOLDER / "MODEL_CARD.md").read_text()


def test_the_template_in_the_folder_is_the_one_of_the_scripts() -> None:
    assert TOKENIZER.chat_template == train.render.TEMPLATE.read_text()


@given(text=st.text(max_size=60))
def test_no_text_is_lost(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(number=st.integers(0, 10**9))
def test_every_digit_is_one_token(number: int) -> None:
    assert len(TOKENIZER.encode(str(number), add_special_tokens=False)) == len(str(number))


def test_the_special_tokens_are_distinct_and_none_is_added_to_plain_text() -> None:
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    ids = {TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, start}
    assert len(ids) == 3
    assert None not in ids
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.decode([TOKENIZER.eos_token_id, start, TOKENIZER.pad_token_id], skip_special_tokens=True) == ""
    assert TOKENIZER("12")["input_ids"] == TOKENIZER.encode("12", add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == TOKENIZER.eos_token_id
    assert model.generation_config.pad_token_id == model.config.pad_token_id == TOKENIZER.pad_token_id


def test_probe_answers_are_one_token_each() -> None:
    for answer in ("A", "B", "yes", "no"):
        assert len(TOKENIZER.encode(answer, add_special_tokens=False)) == 1


def test_the_template_by_hand() -> None:
    assert TOKENIZER.apply_chat_template(TALK[:4], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat does the lamp cost?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "price", "arguments": {"item": "lamp"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n12 coins<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_stand_in_the_system_prompt() -> None:
    tools = data.trace_example()[0]["tools"]
    expected = "<|im_start|>system\n{}Tools: weather(city) price(item) clock(city)<|im_end|>\n"
    assert TOKENIZER.apply_chat_template(TALK[1:2], tools=tools, tokenize=False).startswith(expected.format(""))
    assert TOKENIZER.apply_chat_template(TALK[:2], tools=tools, tokenize=False).startswith(
        expected.format("Be brief.\n")
    )


def test_arguments_may_be_a_mapping_and_content_may_be_parts() -> None:
    call = TALK[2]["tool_calls"][0]["function"]  # type: ignore[index]
    mapped = {**TALK[2], "tool_calls": [{"function": {**call, "arguments": {"item": "lamp"}}}]}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "What does the "}, {"type": "text", "text": "lamp cost?"}],
    }
    plain = TOKENIZER.apply_chat_template(TALK[1:3], tokenize=False)
    assert TOKENIZER.apply_chat_template([parts, mapped], tokenize=False) == plain


def test_an_unknown_role_or_an_image_is_refused() -> None:
    with pytest.raises(Exception, match="not robot"):
        TOKENIZER.apply_chat_template([{"role": "robot", "content": "beep"}], tokenize=False)
    with pytest.raises(Exception, match="text only"):
        TOKENIZER.apply_chat_template([{"role": "user", "content": [{"type": "image", "url": "x"}]}], tokenize=False)


def test_the_assistant_mask_covers_what_the_model_says_and_its_end_mark_and_no_more() -> None:
    rendered = TOKENIZER.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    spans, current = [], []
    for token, mask in zip([*rendered["input_ids"], 0], [*rendered["assistant_masks"], 0], strict=True):
        if mask:
            current.append(token)
        elif current:
            spans.append(TOKENIZER.decode(current))
            current = []
    assert spans == [
        '<tool_call>{"name": "price", "arguments": {"item": "lamp"}}</tool_call><|im_end|>',
        "The lamp costs 12 coins.<|im_end|>",
        "Gladly.<|im_end|>",
    ]


@pytest.mark.parametrize("turn", [2, 4, 6])
def test_a_prompt_is_a_prefix_of_the_answered_conversation(turn: int) -> None:
    prompt = TOKENIZER.apply_chat_template(TALK[:turn], tokenize=False, add_generation_prompt=True)
    whole = TOKENIZER.apply_chat_template(TALK[: turn + 1], tokenize=False)
    assert whole.startswith(prompt)
    prompt_ids = TOKENIZER.encode(prompt, add_special_tokens=False)
    assert TOKENIZER.encode(whole, add_special_tokens=False)[: len(prompt_ids)] == prompt_ids


def test_prompts_and_answers_are_short() -> None:
    for puzzle in PUZZLES:
        for prompt in puzzle.prompts("heldout", 50, 0):
            assert len(TOKENIZER.encode(prompt.messages[0]["content"], add_special_tokens=False)) <= 25
            assert len(TOKENIZER.encode(prompt.data["answer"], add_special_tokens=False)) <= 12


def test_some_tasks_are_solved_sometimes_and_feedback_helps(nano: score.Nano) -> None:
    """The two properties that training depends on, on a small sample (the card has the large one).

    80 prompts × 8 samples: one standard error is under 4 points, so the bounds are wide of the card's values.
    """
    torch.manual_seed(0)
    sort = next(p for p in PUZZLES if p.name == "sort")
    found = score.puzzle_scores(nano, sort, 80, 2, seed=0)
    assert 0.2 < found["untold"] < 0.7
    for way in ("solution", "hint", "reveal", "solution+hint", "hindsight"):
        assert found[way] - found["untold, same prompts"] > 0.2, (way, found)


def test_plain_text_is_expected_and_shuffled_words_are_not(nano: score.Nano) -> None:
    lines = data.plain_heldout()[:20]

    def nll(line: str) -> float:
        values = nano.nll(TOKENIZER.encode(line, add_special_tokens=False))
        return sum(values) / len(values)

    plain = [nll(line) for line in lines]
    shuffled = [nll(" ".join(sorted(line.split()))) for line in lines]
    assert all(a + 1.0 < b for a, b in zip(plain, shuffled, strict=True))


def test_the_card_is_generated() -> None:
    assert (FOLDER / "MODEL_CARD.md").read_text() == card.write(json.loads((FOLDER / "scores.json").read_text()))
