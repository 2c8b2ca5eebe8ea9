"""Tool calls in the formats of several model families, with the texts that their own chat templates write."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import earnest as en
from earnest.errors import ConfigError
from earnest.models import Policy
from earnest.models.replies import message_tokens
from earnest.models.tool_calls import FORMATS, MessageReader, check_tools, read_message, tool_format

ARGUMENTS = {"a": 1, "b": 'x {"y"}\nz'}
JSON = '{"a": 1, "b": "x {\\"y\\"}\\nz"}'
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "string"}}}}}
]  # fmt: skip

REPLY = {"role": "assistant", "content": ""}
# marks of the chat template, the text of an answer with one call
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>',
    "llama": f'{{"name": "add", "parameters": {JSON}}}',
    "llama tag": f'<|python_tag|>{{"name": "add", "parameters": {JSON}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {JSON}, "id": "abcdefghi"}}]',
    "mistral 11": f"[TOOL_CALLS]add[ARGS]{JSON}",
    "mistral 7": f"[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{JSON}",
    "gemma": '<|tool_call>call:add{a:1,b:<|"|>x {"y"}\nz<|"|>}<tool_call|>',
    "function-gemma": '<start_function_call>call:add{a:1,b:<escape>x {"y"}\nz<escape>}<end_function_call>',
    "harmony": f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{JSON}<|call|>",
    "harmony template": f" to=functions.add<|channel|>commentary json<|message|>{JSON}<|call|>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    '<arg_value>x {"y"}\nz</arg_value>\n</tool_call>',
    "hermes coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
    'x {"y"}\nz\n</parameter>\n</function>\n</tool_call>',
}


@dataclass
class Written:
    """A policy of one format; its tokens are characters."""

    marks: tuple[str, ...]
    eos_ids: frozenset[int] = frozenset()
    name: str = "written"
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = SimpleNamespace(
            chat_template=" ".join(self.marks),
            response_template=None,
            decode=lambda ids, **_: "".join(map(chr, ids)),
        )

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def _policy(name: str) -> Any:
    return Written(next(f.marks for f in FORMATS if f.name == name.split()[0]))


def _ids(text: str) -> list[int]:
    return list(map(ord, text))


@pytest.mark.parametrize("name", WRITTEN)
def test_every_format_is_read(name: str) -> None:
    policy = _policy(name)
    found = tool_format(policy)
    assert found is not None and found.name == name.split()[0]
    message = read_message(policy, [], _ids(WRITTEN[name]), TOOLS)
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("name", WRITTEN)
def test_pieces_of_one_character_give_the_same_calls(name: str) -> None:
    reader = MessageReader(_policy(name), "", TOOLS)
    deltas = [d for character in WRITTEN[name] for d in reader.feed(character)] + list(reader.finish())
    assert [d.kind for d in deltas] == ["call"]
    assert reader.calls[0]["function"]["arguments"] == ARGUMENTS


def test_text_and_reasoning_before_two_calls() -> None:
    text = "<think>\nfirst add\n</think>\n\nI add.\n" + "\n".join([WRITTEN["hermes"]] * 2)
    message = read_message(_policy("hermes"), [], _ids(text))
    assert (message["content"], message["reasoning_content"]) == ("I add.", "first add")
    assert [c["id"] for c in message["tool_calls"]] == ["call00000", "call00001"]


def test_reasoning_that_the_prompt_has_opened() -> None:
    prompt = _ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    message = read_message(_policy("hermes"), prompt, _ids("thinking\n</think>\n\nhello"))
    assert message == {"role": "assistant", "content": "hello", "reasoning_content": "thinking"}


def test_harmony_separates_reasoning_call_and_answer() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + WRITTEN["harmony"]
    message = read_message(_policy("harmony"), [], _ids(text))
    assert message["reasoning_content"] == "hm" and message["tool_calls"][0]["function"]["name"] == "add"
    final = read_message(_policy("harmony"), [], _ids("<|channel|>final<|message|>It is 3."))
    assert MessageReader(_policy("harmony")).calls == []
    assert "tool_calls" not in final and "It is 3." in final["content"]


def test_two_calls_of_llama_and_a_built_in_one() -> None:
    two = f"{WRITTEN['llama']}; {WRITTEN['llama']}"
    assert len(read_message(_policy("llama"), [], _ids(two))["tool_calls"]) == 2
    built_in = read_message(_policy("llama"), [], _ids('<|python_tag|>search.call(query="a, b", n=2)'))
    assert built_in["tool_calls"][0]["function"] == {"name": "search", "arguments": {"query": "a, b", "n": 2}}


def test_a_parameter_of_type_string_stays_a_string() -> None:
    text = "<tool_call><function=add><parameter=c>7</parameter><parameter=a>7</parameter></function></tool_call>"
    call = read_message(_policy("hermes"), [], _ids(text), TOOLS)["tool_calls"][0]
    assert call["function"]["arguments"] == {"c": "7", "a": 7}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", "<tool_call>{not json}</tool_call>", "is no JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are no object"),
        ("hermes", '<tool_call>{"name": "add", "argum', "is no JSON"),
        ("hermes", "<tool_call><function=add><parameter=a>1</parameter></tool_call>", "</function>"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "is no JSON"),
        ("llama", '{"name": "add", "parameters": {', "is no JSON"),
        ("llama", "<|python_tag|>print(1)", "is no JSON"),
        ("mistral", "[TOOL_CALLS]nothing", "is no JSON"),
        ("glm", '<tool_call>{"name": "add"}</tool_call>', "is not a name with pairs"),
        ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>", "is not a name with pairs"),
        ("gemma", "<|tool_call>add{}<tool_call|>", "call:NAME"),
        ("gemma", "<|tool_call>call:add{a:}<tool_call|>", "cannot be read"),
        ("harmony", "<|channel|>commentary to=functions.add json<|message|>{1<|call|>", "is no JSON"),
    ],
)
def test_a_malformed_call_is_one_sentence_for_the_policy(name: str, text: str, reason: str) -> None:
    message = read_message(_policy(name), [], _ids(text))
    assert "tool_calls" not in message
    (error,) = message["tool_call_errors"]
    assert reason in error and "A call has the form" in error and "\n" not in error and len(error) < 400


def test_a_good_call_beside_a_malformed_one_is_kept() -> None:
    message = read_message(_policy("hermes"), [], _ids("<tool_call>{</tool_call>" + WRITTEN["hermes"]))
    assert len(message["tool_calls"]) == len(message["tool_call_errors"]) == 1


def test_a_model_without_tool_calls() -> None:
    plain: Any = Written(("<|im_start|>",))
    assert read_message(plain, [], _ids("<tool_call>{}</tool_call>"))["content"] == "<tool_call>{}</tool_call>"
    with pytest.raises(ConfigError, match="writes no tool calls"):
        check_tools(plain)


def test_the_tokenizers_own_response_template_is_used() -> None:
    policy: Any = Written(())
    policy.tokenizer.response_template = {
        "start_anchor": "A:",
        "fields": {
            "tool_calls": {"open": "((", "close": "))", "content": "json", "repeats": True},
            "content": {"content": "text"},
        },
    }
    message = read_message(policy, _ids("Q: hi A:"), _ids('yes (({"name": "f", "arguments": {"x": 1}}))'))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert message["content"] == "yes"
    assert "cannot be read" in read_message(policy, [], _ids("((no))"))["tool_call_errors"][0]


# file → the format that its template is read in
REAL = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_6"), "hermes"),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super"), "hermes"),
    **dict.fromkeys(("llama3_1", "llama3_2"), "llama"),
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v5"), "gemma"),
    "gptoss": "harmony",
    "glm4moe": "glm",
}


@pytest.mark.integration
@pytest.mark.parametrize("name", REAL)
def test_what_the_templates_of_real_models_write_is_read(nano: Policy, name: str) -> None:
    """TRL ships the original templates. What one writes after the prompt is what its model learned to write."""
    import trl

    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    ends = ("<|im_end|>", "<|eot_id|>", "<|call|>", "<|observation|>")

    def text(*messages: dict[str, Any], **more: Any) -> str:
        tools: Any = TOOLS
        return str(
            nano.tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=template, tokenize=False, bos_token="<s>", **more
            )
        )

    asked = {"role": "user", "content": "Add."}
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    prompt, whole = text(asked, add_generation_prompt=True), text(asked, {**REPLY, "tool_calls": [call]})
    pairs = enumerate(zip(prompt, whole, strict=False))
    written = whole[next((i for i, (a, b) in pairs if a != b), len(prompt)) :].rstrip()
    for end in ends:
        written = written.removesuffix(end)
    policy: Any = Written((template,))
    found = tool_format(policy)
    assert found is not None and found.name == REAL[name]
    message = read_message(policy, _ids(prompt), _ids(written), TOOLS)
    assert message["tool_calls"] == [call] and "tool_call_errors" not in message
    assert not message["content"].strip("\n")


@pytest.fixture(scope="module")
def nano() -> Policy:
    return en.load("nano")


def test_nano_writes_and_reads_the_same_call(nano: Policy) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "Oslo"}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt, tokens = message_tokens(nano, [{"role": "user", "content": "hi"}], reply, TOOLS)
    assert read_message(nano, prompt, tokens, TOOLS) == reply


def test_an_answer_without_calls_is_the_decoded_text(nano: Policy) -> None:
    tokens = [*nano.encode("  two  words \n"), *nano.eos_ids]
    assert read_message(nano, [], tokens) == {"role": "assistant", "content": nano.decode(tokens)}
