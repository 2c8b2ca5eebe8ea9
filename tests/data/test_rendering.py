"""The trained tokens are those that the policy would have to sample, on the chat templates of real models.

TRL ships the original templates of many models, and for training a copy of each in which ``{% generation %}`` marks
the assistant's part. The copies are an independent computation of the mask.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import accumulate
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
    "smollm2": ("<|im_end|>", 1),
    "olmo2": ("<|endoftext|>", 1),
    "mistral": ("</s>", 1),
    "zephyr": ("</s>", 1),
}
# Templates of models that TRL does not ship, as their tokenizer_config.json has them.
WRITTEN = {
    "smollm2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "olmo2": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}{% else %}"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    "mistral": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles!') }}"
    "{% endif %}{% endfor %}",
    "zephyr": "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + eos_token }}{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}",
}


@cache
def policy(name: str, end: str, *, training: bool = False) -> Any:
    """nano's tokenizer with the special tokens and the chat template of another model."""
    template = WRITTEN.get(name) or (TEMPLATES / f"{name}{'_training' if training else ''}.jinja").read_text()
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


def spelled(p: Any, rows: list[Rendered]) -> bool:
    """The mask by another way: the characters of questions, answers and ends, found by their text in the decoded rows.

    Each answer is trained whole in one row, and not at all in the others; no question is; what is trained are as many
    runs as there are answers, each ended by the end token; and the last begins where the rendered prompt ends.
    """
    trained_in = Counter[str]()
    runs = 0
    for row in rows:
        pieces = [str(p.tokenizer.decode([t])) for t in row.tokens]
        starts = [0, *accumulate(map(len, pieces))]
        text = "".join(pieces)

        def marks(
            part: str, until: str, row: Rendered = row, starts: list[int] = starts, text: str = text
        ) -> set[bool]:
            """The marks of the tokens from ``part`` to ``until``; none if the row does not have it."""
            at = text.find(part)
            stop = -1 if at < 0 else text.index(until, at) + len(until)
            return {m for m, a, b in zip(row.trained, starts, starts[1:], strict=False) if a < stop and b > at >= 0}

        if any(True in marks(question, question[-1]) for question in ("2+3", "4+4")):
            return False
        for reply in ("It is 5.", "That makes 8, I think."):
            found = marks(reply, reply[-1])
            if len(found) == 2:
                return False
            trained_in[reply] += True in found
        last = [i for i, t in enumerate(row.trained) if t and row.trained[i + 1 : i + 2] != (True,)]
        if not all(row.tokens[i] in p.eos_ids for i in last):
            return False
        runs += len(last)
    options = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
    asked = p.tokenizer.apply_chat_template(list(MESSAGES[:-1]), **options)
    shared = next((i for i, (a, b) in enumerate(zip(asked, rows[-1].tokens, strict=False)) if a != b), len(asked))
    begins = shared < len(rows[-1]) and rows[-1].trained[shared] and not rows[-1].trained[shared - 1]
    return bool(begins and runs == 2 and set(trained_in.values()) == {1})


PLANTED: dict[str, Any] = {
    "the end of a turn is not trained": lambda r: [
        t and not (i + 1 == len(r) or not r[i + 1]) for i, t in enumerate(r)
    ],
    "the mask is shifted by one": lambda r: [False, *r[:-1]],
    "the mask is shifted the other way": lambda r: [*r[1:], False],
    "the mask is empty": lambda r: [False] * len(r),
    "the whole row is trained": lambda r: [True] * len(r),
    "the user's tokens are trained instead": lambda r: [not t for t in r],
    "the second half of an answer is not trained": lambda r: [t and i < len(r) - 4 for i, t in enumerate(r)],
}


@pytest.mark.parametrize("name", REAL)
def test_planted_mistakes_are_caught_on_every_template(name: str) -> None:
    """The mistakes of marin 7237 (no end of turn), Megatron-Bridge 3359 (user tokens, an empty mask) and TRL 5988."""
    end, _ = REAL[name]
    p = policy(name, end)
    rows = demonstration(p, CONVERSATION)
    assert spelled(p, rows)
    for mistake, change in PLANTED.items():
        broken = [Rendered(row.tokens, tuple(change(list(row.trained)))) for row in rows]
        assert not spelled(p, broken), mistake


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
