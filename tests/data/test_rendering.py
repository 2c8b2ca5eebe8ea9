"""The trained tokens are those that the policy would have to sample, on the chat templates of real models.

TRL ships the original templates of many models, and for training a copy of each in which ``{% generation %}`` marks
the assistant's part. The copies are an independent computation of the mask.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from transformers import AutoTokenizer

from earnest.data.layouts import Example, RowError
from earnest.data.rendering import Rendered, answer, demonstration
from earnest.models.places import nano_folder
from tests.models import tiny

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MESSAGES = (
    {"role": "user", "content": "What is 2+3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And 4+4?"},
    {"role": "assistant", "content": "That makes 8, I think."},
)
CONVERSATION = Example("demonstration", MESSAGES[:1], MESSAGES[1:])
# file → the token that ends a turn, and how many rows the conversation gives: reasoning templates rewrite history
REAL = {
    "qwen2_5": ("<|im_end|>", 1),
    "qwen3": ("<|im_end|>", 2),
    "qwen3_instruct_2507": ("<|im_end|>", 1),
    "qwen3_vl": ("<|im_end|>", 1),
    "qwen3_5_think": ("<|im_end|>", 2),
    "qwen3_6": ("<|im_end|>", 2),
    "llama3": ("<|eot_id|>", 1),
    "llama3_1": ("<|eot_id|>", 1),
    "llama3_2": ("<|eot_id|>", 1),
    "gemma": ("<end_of_turn>", 1),
    "gemma3": ("<end_of_turn>", 1),
    "gemma4": ("<turn|>", 1),
    "phi3": ("<|end|>", 1),
    "phi3_5": ("<|end|>", 1),
    "deepseekv3": ("<｜end▁of▁sentence｜>", 1),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", 1),
    "gptoss": ("<|return|>", 2),
    "cohere": ("<|END_OF_TURN_TOKEN|>", 1),
    "cohere2": ("<|END_OF_TURN_TOKEN|>", 1),
    "lfm2": ("<|im_end|>", 1),
    "lfm2_2_5": ("<|im_end|>", 1),
    "nemotron_3_nano": ("<|im_end|>", 1),
}


@cache
def policy(name: str, end: str, *, training: bool = False) -> Any:
    """nano's tokenizer with the special tokens and the chat template of another model."""
    template = (TEMPLATES / f"{name}{'_training' if training else ''}.jinja").read_text()
    tokenizer = AutoTokenizer.from_pretrained(nano_folder())
    special = sorted({end, *re.findall(r"<\|?[A-Za-z_▁｜|0-9]+\|?>", template)})
    tokenizer.add_special_tokens({"additional_special_tokens": special, "bos_token": "<bos>", "eos_token": end})
    tokenizer.chat_template = template
    return SimpleNamespace(name=name, tokenizer=tokenizer, eos_ids={tokenizer.convert_tokens_to_ids(end)})


def trained_text(p: Any, row: Rendered) -> str:
    return str(p.tokenizer.decode([t for t, m in zip(row.tokens, row.trained, strict=True) if m]))


@pytest.mark.parametrize("name", REAL)
def test_trained_tokens_on_real_templates(name: str) -> None:
    end, count = REAL[name]
    p = policy(name, end)
    rows = demonstration(p, CONVERSATION)
    assert len(rows) == count
    text = "".join(trained_text(p, r) for r in rows)
    for reply in ("It is 5.", "That makes 8, I think."):
        assert text.count(reply + ("<|END_RESPONSE|>" if name == "cohere2" else "") + end) == 1
    assert "2+3" not in text and "4+4" not in text
    # The tokens of the last row are the template's own rendering of the whole conversation, up to the last turn's end.
    whole = list(p.tokenizer.apply_chat_template(list(MESSAGES), tokenize=True, return_dict=False))
    assert list(rows[-1].tokens) == whole[: len(rows[-1])]
    assert rows[-1].tokens[-1] in p.eos_ids and rows[-1].trained[-1]


@pytest.mark.parametrize("name", [n for n in REAL if (TEMPLATES / f"{n}_training.jinja").exists() and n != "qwen2_5"])
def test_prefix_differences_agree_with_the_marks_of_trls_training_templates(name: str) -> None:
    """TRL also marks headers and the line break after a turn, which no sampler samples; the answers are the same."""
    end, _ = REAL[name]
    marked = policy(name, end, training=True)
    found = marked.tokenizer.apply_chat_template(
        list(MESSAGES), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    theirs = marked.tokenizer.decode(
        [t for t, m in zip(found["input_ids"], found["assistant_masks"], strict=True) if m]
    )
    plain = policy(name, end)
    for row in demonstration(plain, CONVERSATION):
        for turn in re.split(re.escape(end), trained_text(plain, row))[:-1]:
            assert turn.strip() in theirs
    # The marked template gives one mark for each answer, ended by the token that ends a turn.
    for row in demonstration(marked, CONVERSATION):
        assert trained_text(marked, row).endswith(end)


def test_only_the_last_answer_or_all_tokens_on_request() -> None:
    p = policy("qwen2_5", "<|im_end|>")
    (last,) = demonstration(p, CONVERSATION, "last")
    assert trained_text(p, last) == "That makes 8, I think.<|im_end|>"
    (whole,) = demonstration(p, CONVERSATION, "all")
    assert sum(whole.trained) == len(whole) - 1


def test_an_answer_after_a_prompt_with_earlier_answers_trains_itself_alone() -> None:
    p = policy("qwen2_5", "<|im_end|>")
    row = answer(p, MESSAGES[:3], MESSAGES[3:], ())
    assert trained_text(p, row) == "That makes 8, I think.<|im_end|>"
    assert trained_text(p, demonstration(p, Example("demonstration", MESSAGES[:3], MESSAGES[3:]))[0]) == (
        "That makes 8, I think.<|im_end|>"
    )


def test_a_mark_without_the_end_of_the_turn_is_extended_to_it() -> None:
    """The end token must be learned, or the policy never stops."""
    template = (
        "{% for m in messages %}<start>{{ m.role }} {% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
    )
    p = tiny.policy(template=template)
    (row,) = demonstration(p, Example("demonstration", MESSAGES[:1], MESSAGES[1:2]))
    assert row.trained[-1] and row.tokens[-1] in p.eos_ids


def test_a_text_trains_all_but_its_first_token_and_ends() -> None:
    p = tiny.policy()
    (row,) = demonstration(p, Example("text", text="hello"))
    assert row.trained == (False,) + (True,) * 5 and row.tokens[-1] == p.tokenizer.eos_token_id


def test_without_a_template_a_prompt_and_its_answer_are_written_one_after_the_other() -> None:
    p = tiny.policy(template=None)
    (row,) = demonstration(p, Example("demonstration", MESSAGES[:1], ({"role": "assistant", "content": "it"},)))
    assert sum(row.trained) == 3 and row.tokens[-1] == p.tokenizer.eos_token_id
    with pytest.raises(RowError, match="has no chat template"):
        demonstration(p, CONVERSATION)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "never ends a turn"),
        ("{% for m in messages %}{{ m.role }}{{ m.content|upper }}<eos>{% endfor %}", "do not give it back"),
        ("{{ raise_exception('no system please') }}", "refuses the messages: no system please"),
        (
            "{{ messages|length }}{% for m in messages %}{{ m.content }}<eos>{% endfor %}",
            "differently once the answer is there",
        ),
    ],
)
def test_a_template_that_cannot_teach_the_answer_is_refused(template: str, words: str) -> None:
    with pytest.raises(RowError, match=words):
        demonstration(tiny.policy(template=template), CONVERSATION)


def test_an_answer_with_the_end_token_in_it_is_refused() -> None:
    injected = {"role": "assistant", "content": "it <eos> is"}
    with pytest.raises(RowError, match="a token that ends a turn in it"):
        demonstration(tiny.policy(), Example("demonstration", MESSAGES[:1], (injected,)))
