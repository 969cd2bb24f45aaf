"""Tool declarations as TypeScript: to the space as Kimi's published writer has them, or not at all."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minieagle.typescript import tools_as_typescript


def declared(parameters: Any, **more: Any) -> str | None:
    return tools_as_typescript([{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}])


def members(properties: dict[str, Any], **more: Any) -> str:
    """What stands between the braces of the one function's parameters."""
    text = declared({"type": "object", "properties": properties, **more})
    assert text is not None
    return text.removeprefix("# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {\n").removesuffix(
        "\n}) => any;\n}\n"
    )


# One row: a property's schema, and the line or lines that declare it.
PROPERTIES: list[tuple[Any, str]] = [
    ({"type": "string"}, "  x?: string"),
    ({"type": "integer"}, "  x?: number"),
    ({"type": "boolean", "description": "Yes?"}, "  // Yes?\n  x?: boolean"),
    ({"type": "string", "description": "a\n\nb"}, "  // a\n\n  // b\n  x?: string"),
    ({"type": "string", "pattern": "^a", "maxLength": 3, "minLength": 1, "format": "date"},
     "  // maxLength: 3, minLength: 1, pattern: ^a\n  x?: string"),
    ({"type": "number", "minimum": 0, "maximum": 1.5}, "  // maximum: 1.5, minimum: 0\n  x?: number"),
    ({"type": "string", "default": "caf\u00e9"}, '  // Default: "caf\u00e9"\n  x?: string'),
    ({"type": "boolean", "default": True}, "  // Default: True\n  x?: boolean"),
    ({"type": "array", "default": [1]}, "  // Default: [1]\n  x?: Array<any>"),
    ({"enum": ["a", 1, None]}, '  x?: "a" | 1 | None'),
    ({"type": ["string", "null", "object", "array", "integer"]}, "  x?: string | null | {} | Array<any> | number"),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, "  x?: string | Array<number>"),
    ({"type": "array", "minItems": 1, "items": {"type": "string", "description": "One"}},
     "  // minItems: 1\n  x?: Array<\n    // One\n    string\n  >"),
    ({"type": "object"}, "  x?: {}"),
    ({"type": "object", "additionalProperties": False}, "  x?: {\n    [k: string]: never\n  }"),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, "  x?: {\n    [k: string]: number\n  }"),
    ({"type": "object", "properties": {"b": {}, "a": True}, "required": ["b"]},
     "  x?: {\n    b: any,\n    a?: any\n  }"),
    (False, "  x?: null"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "lines"), PROPERTIES, ids=str)
def test_a_property_is_declared_as_published(schema: Any, lines: str) -> None:
    assert members({"x": schema}) == lines


def test_required_properties_come_first_each_sorted() -> None:
    assert (
        members({"d": {}, "c": {}, "b": {}, "a": {}}, required=["c", "b"])
        == "  b: any,\n  c: any,\n  a?: any,\n  d?: any"
    )


def test_functions_stand_in_one_namespace_under_their_descriptions() -> None:
    tools = [{"function": {"name": "f", "description": "One\ntwo"}}, {"function": {"name": "g", "parameters": None}}]
    lines = ["// One", "// two", "type f = (_: {}) => any;", "type g = (_: {}) => any;"]
    assert tools_as_typescript(tools) == "\n".join(["# Tools\n\n## functions\nnamespace functions {", *lines, "}\n"])


def test_named_schemas_become_interfaces() -> None:
    pair = {"type": "object", "description": "Two", "properties": {"left": {"$ref": "#/$defs/pair"}}}
    text = declared({"properties": {"p": {"$ref": "#/$defs/pair"}}, "$defs": {"pair": pair}})
    assert text is not None
    assert "{\n// Two\ninterface pair {\n  left?: pair\n}\ntype f = (_: {\n  p?: pair\n}) => any;\n}\n" in text


def test_parameters_that_refer_to_themselves_become_an_interface() -> None:
    text = declared({"properties": {"b": {"$ref": "#"}, "a": {"type": "string"}}})
    assert text is not None
    assert "interface parameters {\n  b?: parameters,\n  a?: string\n}\ntype f = (_: parameters) => any;" in text


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": []},
        {"type": ["string", "what"]},
        {"$ref": "#/definitions/x"},
        {"$ref": "#/$defs/no"},
        "x",
        {"anyOf": 5},
    ],
)
def test_what_the_published_writer_can_t_express_is_left_to_json(schema: Any) -> None:
    assert declared({"type": "object", "properties": {"x": schema}}) is None


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.sampled_from(["object", "array", "#"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "properties", "items", "enum", "anyOf", "required", "$ref", "$defs", "default"]),
            inner,
        ),
    ),
)


@given(json_values)
def test_any_schema_is_declared_or_left_to_json(schema: Any) -> None:
    assert isinstance(declared({"properties": {"x": schema}, "required": schema}), str | None)
