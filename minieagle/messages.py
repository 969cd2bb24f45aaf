"""What a caller may put into a conversation: messages and tool declarations, checked and in one shape.

The one idea: after this, nothing downstream meets a surprise. Every string is text, every tool result answers a call of
the turn before it, and whatever is not known is refused by name. What a template can't show is refused later, in
`chat.py`, which knows the template.

Source: the message objects of the OpenAI API, and `reasoning_content` (also spelled `reasoning`) as open models'
servers have it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from minieagle.errors import RequestError

Message = dict[str, Any]

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH: Final = 64  # of a tool's schema; beyond it reading, writing and copying would exhaust the stack
# Which roles may carry a field that asks for something. Null and empty fields ask for nothing.
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "role": ROLES,
    "content": ROLES,
    "name": ROLES,
    "reasoning_content": ("assistant",),
    "reasoning": ("assistant",),
    "tool_calls": ("assistant",),
    "tool_call_id": ("tool",),
}


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with text as content (None where an assistant only calls tools), "developer" as "system", arguments
    as JSON text and reasoning as `reasoning_content`; RequestError naming the message and field at fault."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages={messages!r:.80} must be a list of messages", param="messages")
    if not messages:
        raise RequestError("messages=[] is empty; send at least one message", param="messages")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _check_links(checked)
    return checked


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tool declarations as plain JSON data; RequestError naming the tool and field at fault."""
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise RequestError("tools must be a list of tools", param="tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def check_text(text: object, where: str) -> str:
    """`text` if it is a string of whole characters; RequestError naming `where` otherwise."""
    if not isinstance(text, str):
        raise RequestError(f"{where} must be a string", param=where)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is not "
            "text; remove it",
            param=where,
        ) from None
    return text


def arguments_as_object(text: str) -> dict[str, Any] | None:
    """A call's arguments as the object that their JSON text stands for; None when it stands for none, or a deep one."""
    try:
        value = _json(json.loads(text), "arguments")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f'{where} must be an object with "role" and "content"', param=where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role={role!r:.80} must be one of {', '.join(ROLES)}", param=f"{where}.role")
    given = {name: value for name, value in message.items() if name == "content" or value not in (None, [], {}, "")}
    for name in given:
        _check_field(name, role, where)
    checked = {"role": "system" if role == "developer" else role, "content": _content(given, where)}
    for name in ("name", "tool_call_id"):
        if name in given:
            checked[name] = check_text(given[name], f"{where}.{name}")
    if "tool_calls" in given:
        checked["tool_calls"] = _calls(given["tool_calls"], f"{where}.tool_calls")
    return checked | _reasoning(given, where)


def _check_field(name: str, role: str, where: str) -> None:
    roles = _FIELDS.get(name, ())
    if role not in roles:
        remedy = f"only {' and '.join(roles)} messages have it" if roles else f"known are {', '.join(_FIELDS)}"
        field = f"{where}.{name!s:.80}"
        raise RequestError(f"{field} is not supported: {remedy}; remove it", param=field)


def _content(message: Mapping[str, Any], where: str) -> str | None:
    content, where = message.get("content"), f"{where}.content"
    if content is None and "tool_calls" in message:
        return None
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(
            f'{where}.type={kind!r:.80}: only "text" parts are supported, the model reads no images, audio or files; '
            "describe them in words",
            param=where,
        )
    assert isinstance(part, Mapping), "a part with a type is a mapping"
    return check_text(part.get("text"), f"{where}.text")


def _reasoning(message: Mapping[str, Any], where: str) -> Message:
    given = [name for name in ("reasoning_content", "reasoning") if name in message]
    texts = [check_text(message[name], f"{where}.{name}") for name in given]
    if len(set(texts)) > 1:
        raise RequestError(f"{where}.reasoning contradicts its reasoning_content; send one", param=f"{where}.reasoning")
    return {"reasoning_content": texts[0]} if texts else {}


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list of tool calls", param=where)
    checked = [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]
    if len({call["id"] for call in checked}) < len(checked):
        raise RequestError(f"{where}: two calls have one id; give each its own", param=where)
    return checked


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f'{where} must be {{"id", "type": "function", "function": {{...}}}}', param=where)
    if call.get("type", "function") != "function":
        raise RequestError(f'{where}.type={call["type"]!r:.80}: only "function" is supported', param=f"{where}.type")
    name = _name(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    call_id = check_text(call.get("id"), f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: object, where: str) -> str:
    """Arguments as JSON text, which is how they come from the API; an object is written as templates write it."""
    if isinstance(arguments, Mapping):
        return json.dumps(_json(arguments, where), ensure_ascii=False)
    return check_text(arguments, where)


def _name(name: object, where: str) -> str:
    text = check_text(name, where)
    if not text.strip():
        raise RequestError(f"{where} is empty; name the tool", param=where)
    return text


def _check_links(messages: list[Message]) -> None:
    """Each tool message answers a call of the assistant's message before it, under that call's name if under any."""
    unanswered: dict[str, str] = {}
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            unanswered = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        else:
            _check_answer(message, unanswered, f"messages[{index}]")
            del unanswered[message["tool_call_id"]]


def _check_answer(message: Message, unanswered: Mapping[str, str], where: str) -> None:
    call_id = message.get("tool_call_id", "")
    if call_id not in unanswered:
        raise RequestError(
            f"{where}.tool_call_id={call_id!r:.80} must be the id of a call that the assistant message before it makes "
            f"and that is not answered yet: {', '.join(unanswered)[:300] or 'there is none'}",
            param=f"{where}.tool_call_id",
        )
    if message.get("name", unanswered[call_id]) != unanswered[call_id]:
        raise RequestError(
            f"{where}.name={message['name']!r:.80} is not the name of the call that it answers, "
            f"{unanswered[call_id]!r:.80}; remove it",
            param=f"{where}.name",
        )


def _tool(tool: object, where: str) -> dict[str, Any]:
    data = _json(tool, where)
    function = data.get("function") if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{...}}}}', param=where)
    for name, kind in (("name", str), ("description", str | None), ("parameters", dict | None)):
        if not isinstance(function.get(name), kind):
            field = f"{where}.function.{name}"
            raise RequestError(f"{field}={function.get(name)!r:.80} must be {_WORDS[name]}", param=field)
    _name(function["name"], f"{where}.function.name")
    return data


_WORDS: Final = {
    "name": "a string",
    "description": "a string or null",
    "parameters": "an object (a JSON schema) or null",
}


def _json(value: Any, where: str, depth: int = 0) -> Any:
    """`value` as plain JSON data of bounded depth: dicts with text as keys, lists, text, finite numbers, true, false,
    null."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} deep; flatten it", param=where)
    if isinstance(value, Mapping):
        return {check_text(key, f"{where}: a key"): _json(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item, where, depth + 1) for item in value]
    if isinstance(value, str):
        return check_text(value, where)
    if value is None or isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1e300:
        return value
    raise RequestError(f"{where} holds {value!r:.80}, which is not JSON; remove it", param=where)
