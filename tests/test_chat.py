"""Conversations in a model's markup: as its template renders them, or as its family is known, with nothing left out."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from minieagle.errors import ModelError, RequestError
from minieagle.messages import check_messages
from minieagle.tokenizer import Tokenizer
from tests.published_templates import DEEPSEEK_V3, DEEPSEEK_V31_JSON, DEEPSEEK_V31_TEXT, KIMI_K2, KIMI_K25, NAIVE
from tests.tokenizer_files import BEGIN, END, KIMI, WRITERS, family, names

Json = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.\nToday's.",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string", "description": "Where"}, "unit": {"enum": ["C", "F"]}},
        },
    },
}


def call(
    name: str = "get_weather", arguments: str = '{"city": "Bonn"}', call_id: str = "functions.get_weather:0"
) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text: str = "hi") -> Json:
    return {"role": "user", "content": text}


def assistant(text: str | None = "well", **more: Any) -> Json:
    return {"role": "assistant", "content": text, **more}


def result(text: str = "sun", call_id: str = "functions.get_weather:0") -> Json:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


SYSTEM = {"role": "system", "content": "Be brief."}
CALLING = [user("Weather?"), assistant(None, tool_calls=[call()]), result()]
TWO = [call(), call(arguments="{}", call_id="functions.get_weather:1")]
PARALLEL = [user(), assistant("Both.", tool_calls=TWO), result("a"), result("b", "functions.get_weather:1")]
CONVERSATIONS = {
    "one": [user()],
    "system": [SYSTEM, user()],
    "turns": [SYSTEM, user("a"), assistant("b"), user(" c \n")],
    "late system": [user("a"), assistant("b"), SYSTEM, user("c")],
    "calling": CALLING,
    "parallel": PARALLEL,
    "answered": [*CALLING, assistant("It is sunny."), user("Thanks")],
    "again": [*PARALLEL, assistant(None, tool_calls=[call(call_id="functions.get_weather:2")])]
    + [result("c", "functions.get_weather:2")],
}
REASONING = [user(), assistant("x", reasoning_content="deep"), *CALLING]
REASONING[3] = assistant(None, tool_calls=[call()], reasoning_content="deeper")


def shown(name: str, messages: list[Json], template: str | None = None, **more: Any) -> str:
    tokenizer = family(name, template)
    return names(tokenizer, tokenizer.encode_chat(messages, **more))


def oracle(template: str, messages: list[Json], parsed: bool = False, **more: Any) -> str:
    """The template as transformers renders it. `parsed`: with a call's arguments as an object."""
    messages = json.loads(json.dumps(messages))
    for one in (one for message in messages for one in message.get("tool_calls", ()) if parsed):
        one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    more = {"add_generation_prompt": True, "bos_token": BEGIN, "eos_token": END} | more
    return render_jinja_template([messages], chat_template=template, **more)[0][0]


PUBLISHED = [
    ("Kimi-K2.5", KIMI_K25, False),
    ("Kimi-K2", KIMI_K2, False),
    ("DeepSeek-V3.1", DEEPSEEK_V31_TEXT, False),
    ("DeepSeek-V3.1", DEEPSEEK_V31_JSON, True),
    ("DeepSeek-V3", DEEPSEEK_V3, False),
]


@pytest.mark.parametrize(("name", "template", "parsed"), PUBLISHED)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_template_renders_as_in_transformers(name: str, template: str, parsed: bool, messages: list[Json]) -> None:
    assert shown(name, messages, template) == oracle(template, messages, parsed)


@pytest.mark.parametrize(("name", "template", "parsed"), PUBLISHED)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_family_s_markup_is_its_published_template_s(
    name: str, template: str, parsed: bool, messages: list[Json]
) -> None:
    assert shown(name, messages) == oracle(template, messages, parsed)


@pytest.mark.parametrize(
    "switches", [{}, {"thinking": False}, {"thinking": True}, {"preserve_thinking": True}], ids=str
)
@pytest.mark.parametrize("template", [KIMI_K25, None])
def test_kimi_s_reasoning_follows_the_switches(switches: Json, template: str | None) -> None:
    assert shown("Kimi-K2.5", REASONING, template, **switches) == oracle(KIMI_K25, REASONING, **switches)


@pytest.mark.parametrize("template", [DEEPSEEK_V31_TEXT, None])
def test_deepseek_s_thinking_is_a_switch(template: str | None) -> None:
    for thinking, end in ((True, "<think>"), (False, "</think>")):
        text = shown("DeepSeek-V3.1", [user()], template, thinking=thinking)
        assert text == f"{BEGIN}<\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c>{end}"


def test_r1_opens_the_reasoning_and_k2_thinking_leaves_that_to_the_model() -> None:
    assert shown("DeepSeek-R1", [user()]) == f"{BEGIN}<\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c><think>\n"
    assert shown("Kimi-K2-Thinking", [user(), assistant("a"), user()]).endswith(
        "<|im_assistant|>assistant<|im_middle|>"
    )
    assert "<|im_middle|><think></think>a" in shown("Kimi-K2-Thinking", [user(), assistant("a"), user()])


def test_without_generation_prompt_a_conversation_ends_with_its_last_turn() -> None:
    for name in WRITERS:
        text = shown(name, [user(), assistant("well")], add_generation_prompt=False)
        assert text.endswith("well" + (END if name.startswith("Deep") else "<|im_end|>"))


DECLARED = {
    "Kimi-K2": "<|im_system|>tool_declare<|im_middle|>" + json.dumps([WEATHER], separators=(",", ":")) + "<|im_end|>",
    "Kimi-K2.5": """<|im_system|>tool_declare<|im_middle|># Tools

## functions
namespace functions {
// The weather of a city.
// Today's.
type get_weather = (_: {
  // Where
  city: string,
  unit?: "C" | "F"
}) => any;
}
<|im_end|>""",
    "DeepSeek-V3.1": BEGIN
    + """Be brief.

## Tools
You have access to the following tools:

### get_weather
Description: The weather of a city.
Today's.

Parameters: """
    + json.dumps(WEATHER["function"]["parameters"]),
}


@pytest.mark.parametrize("name", DECLARED)
def test_tools_are_declared_first(name: str) -> None:
    assert shown(name, [SYSTEM, user()], tools=[WEATHER]).startswith(DECLARED[name])


def test_tools_reach_a_template_that_has_a_place_for_them() -> None:
    assert shown("Kimi-K2.5", [user()], KIMI_K25, tools=[WEATHER]).startswith(DECLARED["Kimi-K2.5"])
    assert shown("Kimi-K2", [user()], KIMI_K2, tools=[WEATHER]) == oracle(KIMI_K2, [user()], tools=[WEATHER])


def test_where_the_template_has_no_place_for_tools_the_family_s_markup_has() -> None:
    assert shown("DeepSeek-V3.1", [user()], DEEPSEEK_V31_TEXT, tools=[WEATHER]) == shown(
        "DeepSeek-V3.1", [user()], tools=[WEATHER]
    )
    with pytest.raises(RequestError, match=r"tools\[0\]: the chat template leaves this tool out"):
        shown("DeepSeek-V3", [user()], tools=[WEATHER])


def test_kimi_knows_calls_by_its_own_ids() -> None:
    calls = [call(call_id="call_x"), call("other", call_id="call_y")]
    messages = [user(), assistant(None, tool_calls=calls), result("a", "call_y"), result("b", "call_x")]
    text = shown("Kimi-K2", messages)
    assert "<|tool_call_begin|>functions.get_weather:0<" in text and "<|tool_call_begin|>functions.other:1<" in text
    assert "## Return of functions.other:1\na" in text and "## Return of functions.get_weather:0\nb" in text


def test_a_name_takes_the_role_s_place_where_the_template_has_one() -> None:
    assert "<|im_user|>Ann<|im_middle|>hi" in shown("Kimi-K2.5", [user() | {"name": "Ann"}])
    with pytest.raises(RequestError, match=r"messages\[0\]\.name: the chat template leaves this name out"):
        shown("DeepSeek-V3", [user() | {"name": "Ann"}])


control_names = st.sampled_from(
    [*KIMI, BEGIN, END, "<\uff5cUser\uff5c>", "<|im_", "end|>", "im_end|>", '"', "\\", "{{"]
)
texts = st.lists(st.one_of(control_names, st.text(st.characters(codec="utf-8"), max_size=4)), min_size=1).map(
    lambda parts: "x" + "".join(parts)
)


def everywhere(text: str) -> tuple[list[Json], list[Json]]:
    """A conversation and its tools with `text` wherever a caller may write."""
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text, "default": text}}}
    tools = [{"type": "function", "function": {"name": text, "description": text, "parameters": schema}}]
    calls = [call(text, json.dumps({text: text}, ensure_ascii=False), text)]
    asked = assistant(text, tool_calls=calls, reasoning_content=text)
    return [SYSTEM | {"content": text}, user(text), asked, result(text, text), assistant(text), user(text)], tools


@pytest.mark.parametrize("template", [None, "own"])
@pytest.mark.parametrize("name", ["Kimi-K2.5", "Kimi-K2", "DeepSeek-V3.1", "DeepSeek-V3"])
@given(st.data())
def test_no_text_of_a_caller_becomes_a_control_token(name: str, template: str | None, data: st.DataObject) -> None:
    own = {"Kimi-K2.5": KIMI_K25, "Kimi-K2": KIMI_K2, "DeepSeek-V3.1": DEEPSEEK_V31_JSON, "DeepSeek-V3": DEEPSEEK_V3}
    tokenizer = family(name, None if template is None else own[name])
    found = []
    for text in ("harmless", data.draw(texts) + "x"):
        messages, tools = everywhere(text)
        ids = tokenizer.encode_chat(messages, tools=None if name == "DeepSeek-V3" else tools)
        found.append([one for one in ids if one not in PLAIN[tokenizer.kind]])
    assert found[0] == found[1]


PLAIN = {"tiktoken": range(family("Kimi-K2").vocab_size - 256), "tokenizer.json": range(2, 500)}


@given(texts)
def test_a_template_that_composes_names_around_a_caller_s_text_makes_no_token_of_it(text: str) -> None:
    tokenizer = family("Kimi-K2", NAIVE)
    ids = tokenizer.encode_chat([user("im_end|>" + text) | {"name": "<|"}])
    assert names(tokenizer, [one for one in ids if one not in PLAIN["tiktoken"]]) == "<|im_user|><|im_end|>"


@given(texts)
def test_a_caller_s_text_is_shown_to_the_character(text: str) -> None:
    tokenizer = family("DeepSeek-V3.1", DEEPSEEK_V31_TEXT)
    ids = tokenizer.encode_chat([user(text), assistant(None, tool_calls=[call(text, f'{{"{text}"')])])
    body = f'<\uff5ctool\u2581call\u2581begin\uff5c>{text}<\uff5ctool\u2581sep\uff5c>{{"{text}"<\uff5ctool'
    assert f"<\uff5cUser\uff5c>{text}<\uff5cAssistant" in names(tokenizer, ids) and body in names(tokenizer, ids)


@pytest.mark.parametrize(
    ("template", "messages", "cause"),
    [
        ("{{ messages[0].role }}", [user()], "messages[0]: the chat template leaves this user message out"),
        ("{{ messages[0].content[:60] }}", [user("x" * 99)], "messages[0]: the chat template leaves this user"),
        (
            "{{ messages[0].content }}",
            [user() | {"name": "Ann"}],
            "messages[0].name: the chat template leaves this name",
        ),
        (
            "{{ messages[0].content }}",
            [user(), assistant("", tool_calls=[call()])],
            "messages[1].tool_calls[0]: the chat",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", CALLING, "messages[2].role: this model's chat template"),
    ],
)
def test_what_a_template_leaves_out_is_refused(template: str, messages: list[Json], cause: str) -> None:
    with pytest.raises(RequestError) as caught:
        shown("Kimi-K2", messages, template)
    assert str(caught.value).startswith(cause) and caught.value.param == cause.split(":")[0]


def test_results_out_of_order_need_a_template_that_shows_ids() -> None:
    swapped = [*PARALLEL[:2], PARALLEL[3], PARALLEL[2]]
    assert "functions.get_weather:1\nb" in shown("Kimi-K2", swapped)
    with pytest.raises(RequestError, match=r"messages\[2\]\.tool_call_id.* shows no ids"):
        shown("DeepSeek-V3.1", swapped)


@pytest.mark.parametrize(
    ("name", "switches", "cause"),
    [
        ("Kimi-K2.5", {"enable_thinking": False}, "enable_thinking is not a switch .*has preserve_thinking, thinking"),
        ("Kimi-K2", {"thinking": False}, r"thinking is not a switch .*\(it has none\)"),
        ("Kimi-K2.5", {"tools_ts_str": "x"}, "tools_ts_str is not a switch"),
        ("DeepSeek-V3.1", {"bos_token": "x"}, "bos_token is not a switch"),
        ("DeepSeek-V3.1", {"thinking": [1]}, "thinking=.* must be true, false"),
        ("DeepSeek-V3.1", {"thinking": "\ud800"}, "lone surrogate"),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_a_switch_that_the_markup_lacks_is_refused(name: str, switches: Json, cause: str, own: bool) -> None:
    template = {"Kimi-K2.5": KIMI_K25, "Kimi-K2": KIMI_K2, "DeepSeek-V3.1": DEEPSEEK_V31_TEXT}[name] if own else None
    with pytest.raises(RequestError, match=cause) as caught:
        shown(name, [user()], template, **switches)
    assert caught.value.param == next(iter(switches))


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([result()], "messages[0].tool_call_id"),
    ([*CALLING, result()], "messages[3].tool_call_id"),  # answered twice
    ([CALLING[0], CALLING[1], user(), result()], "messages[3].tool_call_id"),
    ([CALLING[0], CALLING[1], result() | {"name": "other"}], "messages[2].name"),
    ([user() | {"tool_calls": [call()]}], "messages[0].tool_calls"),
    ([user() | {"tool_call_id": "x"}], "messages[0].tool_call_id"),
    ([user() | {"reasoning_content": "x"}], "messages[0].reasoning_content"),
    ([assistant("", reasoning="a", reasoning_content="b")], "messages[0].reasoning"),
    ([assistant(None)], "messages[0].content"),
    ([assistant("", tool_calls=5)], "messages[0].tool_calls"),
    ([assistant("", tool_calls=[{"id": "x"}])], "messages[0].tool_calls[0]"),
    ([assistant("", tool_calls=[call() | {"type": "custom"}])], "messages[0].tool_calls[0].type"),
    ([assistant("", tool_calls=[call(" ")])], "messages[0].tool_calls[0].function.name"),
    ([assistant("", tool_calls=[call() | {"id": None}])], "messages[0].tool_calls[0].id"),
    ([assistant("", tool_calls=[call(), call()])], "messages[0].tool_calls"),
    ([assistant("", tool_calls=[call(arguments=5)])], "messages[0].tool_calls[0].function.arguments"),  # type: ignore[arg-type]
    ([assistant("", tool_calls=[call(arguments="\ud800")])], "messages[0].tool_calls[0].function.arguments"),
    ([user() | {"name": 5}], "messages[0].name"),
    ([user() | {"audio": "x"}], "messages[0].audio"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_a_bad_message_is_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        family("Kimi-K2").encode_chat(messages)
    assert caught.value.param == param and param in str(caught.value)


def nested(depth: int) -> Any:
    return json.loads('{"not": ' * depth + "{}" + "}" * depth)


BAD_TOOLS: list[tuple[Any, str]] = [
    ({}, "tools"),
    ([5], "tools[0]"),
    ([{"type": "web"}], "tools[0]"),
    ([{"type": "function", "function": {}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": " "}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "x", "parameters": []}}], "tools[0].function.parameters"),
    ([{"type": "function", "function": {"name": "x", "description": 5}}], "tools[0].function.description"),
    ([{"type": "function", "function": {"name": "\udfff"}}], "tools[0]"),
    ([{"type": "function", "function": {"name": "x", "parameters": nested(900)}}], "tools[0]"),
    ([{"type": "function", "function": {"name": "x", "parameters": {"maximum": float("nan")}}}], "tools[0]"),
    ([{"type": "function", "function": {"name": "x", "parameters": {"maximum": {1, 2}}}}], "tools[0]"),
    ([{"type": "function", "function": {"name": "x", "parameters": {5: 5}}}], "tools[0]: a key"),
]


@pytest.mark.parametrize(("tools", "param"), BAD_TOOLS)
def test_a_bad_tool_is_refused_by_name(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        family("Kimi-K2").encode_chat([user()], tools=tools)
    assert caught.value.param == param and param in str(caught.value)


def test_arguments_may_come_as_an_object_and_reasoning_under_either_name() -> None:
    parsed = assistant(None, tool_calls=[call(arguments={"city": "K\u00f6ln"})], reasoning="deep")  # type: ignore[arg-type]
    text = shown("Kimi-K2.5", [user(), parsed, result()])
    assert '<|tool_call_argument_begin|>{"city": "K\u00f6ln"}<' in text and "<think>deep</think>" in text


@pytest.mark.parametrize("name", WRITERS)
def test_a_family_is_known_by_its_control_tokens(name: str) -> None:
    tokenizer = family(name)
    ends = ["<|im_end|>", "[EOS]"] if name.startswith("Kimi") else [END]
    assert tokenizer.family == name and sorted(map(tokenizer.token_name, tokenizer.stop_ids)) == sorted(ends)


@pytest.mark.parametrize(
    "declared",
    [5, {"default": "x"}, ["x", {"name": "default", "template": 5}], "{% if", "{{ x | nofilter }}", "x" * 2**21],
)
def test_an_unusable_template_is_refused_when_the_model_is_loaded(tmp_path: Any, declared: Any) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template"):
        Tokenizer(WRITERS["Kimi-K2"](tmp_path, chat_template=declared))


@pytest.mark.parametrize("name", ["q" * 999, 5])
def test_a_field_s_name_is_quoted_at_most_80_characters_long(name: object) -> None:
    with pytest.raises(RequestError, match=rf"messages\[0\]\.{str(name)[:80]} is not supported"):
        check_messages([{"role": "user", "content": "a", name: 1}])  # type: ignore[dict-item]
