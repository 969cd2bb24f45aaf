"""Tool declarations as the TypeScript text that Kimi-K2.5 and later were trained to read.

The one idea: the text must be the one of training, to the space, or tool calls get worse (by about 1.7 points of BFCL
with JSON instead). What the published writer can't express makes it fall back to JSON; so does this one, by answering
None.

Source: the tool declaration code that Moonshot publishes with Kimi-K2.5, restated. Properties are sorted, required ones
first; comments carry description, bounds and default.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

Schema = Mapping[str, Any]

_INDENT: Final = "  "
_BOUNDS: Final = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_MEMBERS: Final = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}


def tools_as_typescript(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The declaration of `tools` ({"type": "function", "function": {...}} each); None when it can't be written so."""
    try:
        functions = "\n".join(_function(tool["function"]) for tool in tools)
    except (ValueError, KeyError, TypeError, AttributeError):  # a schema of another shape than the writer knows
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


class _References:
    """The named schemas of one function, and whether anything refers to its parameters as a whole."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}
        self.has_root = False

    def name(self, reference: str) -> str:
        if reference == "#":
            self.has_root = True
            return "parameters"
        name = reference.removeprefix("#/$defs/")
        if name == reference or name not in self.schemas:
            raise ValueError(f"unknown reference {reference}")
        return name


def _function(function: Schema) -> str:
    references = _References()
    parameters = function.get("parameters") or {}
    typed = _object(parameters, "", references)
    lines = [_interface("parameters", parameters, references)] if references.has_root else []
    for name, schema in tuple(references.schemas.items()):
        lines += [_comment(schema.get("description")), f"interface {name} {_type(schema, '', references)}"]
    lines.append(_comment(function.get("description")))
    lines.append(f"type {function['name']} = (_: {'parameters' if references.has_root else typed}) => any;")
    return "\n".join(filter(None, lines))


def _interface(name: str, schema: Schema, references: _References) -> str:
    """The parameters under a name of their own, in the order given."""
    members = [_member(schema, key, _INDENT, references) for key in schema.get("properties", {})]
    body = "\n" + ",\n".join(members) + "\n" if members else ""
    return f"interface {name} {{{body}}}"


def _type(schema: Any, indent: str, references: _References) -> str:
    if isinstance(schema, bool) or schema == {}:
        return "null" if schema is False else "any"
    if "$ref" in schema:
        return references.name(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(one, indent, references) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):
        return " | ".join(_UNION_MEMBERS[one] for one in kind)
    if kind == "object":
        return _object(schema, indent, references)
    if kind == "array":
        return _array(schema, indent, references)
    return "number" if kind == "integer" else str(kind)


def _object(schema: Schema, indent: str, references: _References) -> str:
    references.schemas.update(schema.get("$defs") or {})
    inner = indent + _INDENT
    required = schema.get("required") or []
    names = sorted(schema.get("properties", {}), key=lambda name: (name not in required, name))
    members = [_member(schema, name, inner, references) for name in names]
    rest = schema.get("additionalProperties")
    if rest is not None:
        value = "never" if rest is False else _type(rest, inner, references)
        members.append(f"{inner}[k: string]: {value}")
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" if members else "{}"


def _member(schema: Schema, name: str, indent: str, references: _References) -> str:
    of = schema["properties"][name]
    default = of.get("default") if isinstance(of, Mapping) else None
    comments = _comments(of, indent)
    if default is not None:
        shown = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
        comments += f"{indent}// Default: {shown}\n"
    optional = "" if name in (schema.get("required") or []) else "?"
    return f"{comments}{indent}{name}{optional}: {_type(of, indent, references)}"


def _array(schema: Schema, indent: str, references: _References) -> str:
    items = schema.get("items") or True
    inner = indent + _INDENT
    comments = _comments(items, inner)
    if not comments:
        return f"Array<{_type(items, indent, references)}>"
    return f"Array<\n{comments}{inner}{_type(items, inner, references)}\n{indent}>"


def _comments(schema: Any, indent: str) -> str:
    """Comment lines above a member: its description, then its bounds."""
    if not isinstance(schema, Mapping):
        return ""
    lines = [_comment(schema.get("description"), indent)]
    kind = "" if {"$ref", "anyOf", "enum"} & schema.keys() else schema.get("type", "")
    bounds = [f"{name}: {schema[name]}" for name in _BOUNDS.get(str(kind), ()) if name in schema]
    if bounds:
        lines.append(f"{indent}// {', '.join(bounds)}")
    return "".join(f"{line}\n" for line in lines if line)


def _comment(description: str | None, indent: str = "") -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in (description or "").split("\n"))
