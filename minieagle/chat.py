"""A conversation in the markup of a model: through the template of its directory, or the one known for its family.

The one idea: nothing that a caller says is left out without a word. Content, names, tool calls and tools go into the
template marked (`guard.py`), and what does not come out is refused by name. Two things may be left out, since
published templates do so on purpose: the reasoning of earlier turns, and the ids of tool calls where results stand in
their order.

Source: the variables that Hugging Face's chat templates are written for (`messages`, `tools`,
`add_generation_prompt`, the names of the special tokens), and `tools_ts_str`, which Kimi-K2.5's template prefers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from minieagle.errors import ModelError, RequestError
from minieagle.family import TEMPLATES, Family
from minieagle.guard import Guard
from minieagle.messages import Message, arguments_as_object, check_text
from minieagle.model_file import read_text
from minieagle.template import Template, TemplateFault
from minieagle.typescript import tools_as_typescript

# What the engine itself passes, so that no switch may.
_VARIABLES: Final = {"messages", "tools", "tools_ts_str", "documents", "add_generation_prompt"}
_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, kw_only=True)
class Markup:
    """A template, the variables that are the same for every conversation, the switches that a caller may set, and
    whether tools are declared as TypeScript."""

    template: Template
    constants: Mapping[str, Any]
    switches: frozenset[str]
    typescript_tools: bool

    @property
    def has_tools(self) -> bool:
        return bool(self.template.reads & {"tools", "tools_ts_str"})


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a caller sent, checked. `switches` are template variables such as `thinking`."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    switches: Mapping[str, Any] = field(default_factory=dict[str, Any])
    add_generation_prompt: bool = True


class Chat:
    """The markups of one model directory. Immutable."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], family: Family | None) -> None:
        """`settings` is the content of tokenizer_config.json. ModelError naming the file of a template that can't be
        used."""
        self._name = directory.name
        self._family = family
        tokens = {name: token_text(settings.get(name)) for name in _TOKENS}
        constants = {name: text for name, text in tokens.items() if text is not None}
        self._own = _own_markup(directory, settings, constants)

    def render(self, conversation: Conversation, control_tokens: Collection[str]) -> tuple[str, Guard]:
        """The conversation as markup, and the guard that gives a caller's characters in it back; RequestError naming
        what is at fault."""
        markup = self._markup(conversation)
        _check_switches(conversation.switches, markup)
        _check_results(conversation.messages, markup)
        if self._family is not None and self._family.numbers_calls:
            conversation = replace(conversation, messages=_with_numbered_calls(conversation.messages))
        # Templates want a call's arguments as text, as the API has them, or as an object. On the wrong one they fail,
        # or quote the text once more.
        calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
        try:
            return _render(markup, conversation, control_tokens, calls_as_objects=False)
        except RequestError:
            if not calls or any(arguments_as_object(call["function"]["arguments"]) is None for call in calls):
                raise
        return _render(markup, conversation, control_tokens, calls_as_objects=True)

    def _markup(self, conversation: Conversation) -> Markup:
        """The directory's own template, unless it lacks a place for tools that the family's markup has."""
        own = self._own
        if own is not None and (own.has_tools or not conversation.tools or self._family is None):
            return own
        if self._family is None:
            raise RequestError(
                f"messages need a chat template, and {self._name} has neither chat_template.jinja nor one in "
                "tokenizer_config.json; send a plain prompt instead"
            )
        return _family_markup(self._family)


def token_text(token: object) -> str | None:
    """A token in tokenizer_config.json is its text, or an object that holds it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _own_markup(directory: Path, settings: Mapping[str, Any], constants: Mapping[str, Any]) -> Markup | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        source, where = read_text(path), str(path)
    else:
        where = f"{directory / 'tokenizer_config.json'}: chat_template"
        source = _declared_template(settings.get("chat_template"), where)
    if source is None:
        return None
    template = Template(source, where)
    return Markup(
        template=template,
        constants=constants,
        switches=template.reads - _VARIABLES - constants.keys(),
        typescript_tools="tools_ts_str" in template.reads,
    )


def _declared_template(declared: object, where: str) -> str | None:
    """A template, or several by name of which "default" is the one for conversations."""
    if isinstance(declared, list):
        named = [entry for entry in declared if isinstance(entry, dict) and entry.get("name") == "default"]
        declared = named[0].get("template") if named else None
    if declared is not None and not isinstance(declared, str):
        raise ModelError(f"{where} must be text or a list of named templates, not {type(declared).__name__}; mend it")
    return declared


def _family_markup(family: Family) -> Markup:
    path = TEMPLATES / family.markup
    return Markup(
        template=Template(read_text(path), str(path)),
        constants=family.constants,
        switches=family.switches,
        typescript_tools=family.typescript_tools,
    )


def _check_switches(switches: Mapping[str, Any], markup: Markup) -> None:
    for name, value in switches.items():
        if name not in markup.switches:
            known = ", ".join(sorted(markup.switches)) or "none"
            raise RequestError(f"{name:.80} is not a switch of this model's chat template (it has {known})", param=name)
        if isinstance(value, str):
            check_text(value, name)
        elif value is not None and not isinstance(value, bool | int | float):
            raise RequestError(f"{name}={value!r:.80} must be true, false, a number or text", param=name)


def _check_results(messages: Sequence[Message], markup: Markup) -> None:
    """Tool messages need a template that names their role, else their text would pass for some turn of the
    conversation; and where it shows no ids, they must stand in the order of their calls, which then says whose they
    are."""
    calls: list[str] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message["role"] != "tool":
            calls = [call["id"] for call in message.get("tool_calls", ())]
        elif not markup.template.has("'tool'", '"tool"'):
            raise RequestError(
                f"{where}.role: this model's chat template knows no tool messages; remove it", param=f"{where}.role"
            )
        elif message["tool_call_id"] != calls.pop(0) and not markup.template.has("tool_call_id"):
            raise RequestError(
                f"{where}.tool_call_id: this model's chat template shows no ids; send results in their calls' order",
                param=f"{where}.tool_call_id",
            )


def _with_numbered_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with Kimi's own ids of calls, functions.NAME:NUMBER counted over the conversation. Clients that
    make up ids of their own would have the model imitate those."""
    numbered: dict[str, str] = {}
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        prefix = f"functions.{call['function']['name']}:"
        known = call["id"].startswith(prefix) and call["id"].removeprefix(prefix).isdecimal()
        numbered[call["id"]] = call["id"] if known else f"{prefix}{len(numbered)}"
    return [_with_ids(message, numbered) for message in messages]


def _with_ids(message: Message, ids: Mapping[str, str]) -> Message:
    if "tool_calls" in message:
        return {**message, "tool_calls": [{**call, "id": ids[call["id"]]} for call in message["tool_calls"]]}
    return {**message, "tool_call_id": ids[message["tool_call_id"]]} if "tool_call_id" in message else message


def _render(
    markup: Markup, conversation: Conversation, control_tokens: Collection[str], *, calls_as_objects: bool
) -> tuple[str, Guard]:
    guard = Guard(control_tokens)
    variables = _variables(markup, conversation, guard, calls_as_objects)
    try:
        rendered = markup.template.render(variables)
    except TemplateFault as fault:
        if fault.broken:
            raise RequestError(
                f"messages: the chat template in {markup.template.where} fails: {guard.clear(str(fault))}; "
                "mend it, or shorten the conversation",
                param="messages",
            ) from None
        raise RequestError(
            f"messages: the chat template refuses this conversation: {guard.clear(str(fault))}; change the order, the "
            "roles or the fields of the messages",
            param="messages",
        ) from None
    missing = guard.missing(rendered)
    if missing is not None:
        raise RequestError(
            f"{missing.where}: the chat template leaves this {missing.what} out; remove it", param=missing.where
        )
    return rendered, guard


def _variables(markup: Markup, conversation: Conversation, guard: Guard, calls_as_objects: bool) -> dict[str, Any]:
    seen = partial(_seen_message, guard=guard, calls_as_objects=calls_as_objects)
    return {
        **markup.constants,
        **guard.data(dict(conversation.switches)),
        **_seen_tools(markup, conversation.tools, guard),
        "messages": [seen(message, where=f"messages[{index}]") for index, message in enumerate(conversation.messages)],
        "documents": None,
        "add_generation_prompt": conversation.add_generation_prompt,
    }


def _seen_tools(markup: Markup, tools: Sequence[dict[str, Any]], guard: Guard) -> dict[str, Any]:
    if not tools:
        return {"tools": None}
    if markup.typescript_tools:
        tools = _sorted(tools)  # as the code does that comes with such a template
        declaration = tools_as_typescript(tools)
        if declaration is not None:
            return {"tools": guard.data(tools), "tools_ts_str": guard.shown(declaration, "tools", "declaration")}
    seen = guard.data(list(tools))
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        seen[index]["function"]["name"] = guard.shown(name, f"tools[{index}]", "tool")
    return {"tools": seen}


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _sorted(item) for name, item in sorted(value.items())}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def _seen_message(message: Message, *, where: str, guard: Guard, calls_as_objects: bool) -> Message:
    """A message as the template sees it. A tool's name may be left out: it is that of the call that it answers."""
    seen: Message = {"role": message["role"], "content": message["content"]}
    if message["content"] is not None:
        seen["content"] = guard.shown(message["content"], where, f"{message['role']} message")
    if "name" in message and message["role"] != "tool":
        seen["name"] = guard.shown(message["name"], f"{where}.name", "name")
    for name in {"name", "tool_call_id", "reasoning_content"} & message.keys() - seen.keys():
        seen[name] = guard.text(message[name])
    if "reasoning_content" in seen:
        seen["reasoning"] = seen["reasoning_content"]  # templates read it under either name
    if "tool_calls" in message:
        seen["tool_calls"] = [
            _seen_call(call, f"{where}.tool_calls[{index}]", guard, calls_as_objects)
            for index, call in enumerate(message["tool_calls"])
        ]
    return seen


def _seen_call(call: Mapping[str, Any], where: str, guard: Guard, as_object: bool) -> dict[str, Any]:
    """A call as the template sees it. An id that holds the name shows it too: Kimi's calls have no other name."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    call_id = guard.text(call["id"])
    if name in call["id"]:
        call_id = guard.shown(call["id"], where, "tool call", either=f"{where}.name")
    return {
        "id": call_id,
        "type": "function",
        "function": {
            "name": guard.shown(name, where, "tool call", either=f"{where}.name"),
            "arguments": guard.data(arguments_as_object(arguments))
            if as_object
            else guard.shown(arguments, where, "tool call", verbatim=True),
        },
    }
