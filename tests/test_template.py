"""Templates run in a limited process: whatever one holds, it ends in its text or in a clear fault."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from minieagle import template
from minieagle.errors import ModelError, RequestError
from minieagle.template import Template, TemplateFault
from tests.tokenizer_files import family

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

# n is 0: so that no constant is folded when the template is compiled, and the fault is the rendering's.
FAULTS = {
    "a loop without end": (LOOP, "stopped after 1 s of processor time"),
    "a power": ("{{ (n + 10) ** (10 ** 9) }}", "stopped after|more than 512 MiB"),
    "a filter that fills": ("{{ 'a' | center(10 ** 9 + n) }}", "more than 512 MiB"),
    "a doubling": (
        "{% set ns = namespace(s='aaaa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "more than 512 MiB",
    ),
    "much text": ("{% for i in range(99999) %}{{ 'abc' * 1000 }}{% endfor %}", "exceeds 33554432 characters"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(n) }}", "RecursionError"),
    "division": ("{{ 1 / n }}", "ZeroDivisionError: division by zero"),
    "types": ("{{ [n] + 'a' }}", "TypeError: can only concatenate list"),
    "an attribute": ("{{ n.x.y }}", "has no attribute 'x'"),
    "a wrong argument": ("{{ n | round(method='x') }}", "FilterArgumentError|method must be"),
    "a key": ("{{ dict(a=n)['a'].upper() }}", "has no attribute 'upper'"),
    "the classes": ("{{ ''.__class__.__mro__ }}", "is unsafe"),
    "its own refusal": ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
    "a mutation": ("{{ messages.append(n) }}", "is not safely callable|unsafe"),
    "an import": ("{% include 'x' %}", "no loader"),
}


@pytest.mark.parametrize(("source", "cause"), FAULTS.values(), ids=FAULTS)
def test_a_template_s_fault_is_told(source: str, cause: str) -> None:
    with pytest.raises(TemplateFault, match=cause):
        Template(source, "here").render({"n": 0, "messages": []})
    assert Template("{{ n }}", "here").render({"n": 5}) == "5"  # the next one is served


@pytest.mark.parametrize("name", ["a loop without end", "a doubling", "division"])
def test_a_template_s_fault_costs_the_request_that_it_spoils(name: str) -> None:
    tokenizer = family("Kimi-K2", "{% set n = messages | length - 1 %}" + FAULTS[name][0])
    with pytest.raises(RequestError, match=r"messages: the chat template in .*chat_template.* fails: "):
        tokenizer.encode_chat(USER)


def test_a_template_s_own_refusal_is_the_conversation_s_and_quotes_no_control_characters() -> None:
    tokenizer = family("Kimi-K2", "{{ raise_exception('no\\x1b[2J\\nroles ' ~ messages[0].content) }}")
    with pytest.raises(RequestError, match="refuses this conversation: no\ufffd.2J\ufffdroles hi; change the order"):
        tokenizer.encode_chat(USER)


@pytest.mark.parametrize("made", ["'\\ud800'", "('%c' % 57343)"])
def test_a_template_that_makes_no_text_is_named(made: str) -> None:
    tokenizer = family("Kimi-K2", "{{ messages[0].content }}{{ " + made + " }}")
    with pytest.raises(RequestError, match=r"chat_template.*lone surrogate U\+D"):
        tokenizer.encode_chat(USER)


@pytest.mark.parametrize("char", [0xD800, 9_999_999])
def test_a_template_cannot_make_up_characters_from_the_marks_that_it_sees(char: int) -> None:
    made = f"{{{{ messages[0].content }}}}{{{{ messages[0].content[:20] }}}}3{char:07d}"
    tokenizer = family("Kimi-K2", made)
    assert tokenizer.decode(tokenizer.encode_chat(USER)) == "hi"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{% if", "not valid Jinja"),
        ("{{ x | nofilter }}", "not valid Jinja: No filter named 'nofilter'"),
        ("{% frobnicate %}", "not valid Jinja"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError|not valid Jinja|ended"),
        ("x" * (template.MAX_TEMPLATE_CHARS + 1), "has 1048577 characters"),
    ],
)
def test_a_template_that_does_not_compile_is_the_model_s_fault(source: str, cause: str) -> None:
    with pytest.raises(ModelError, match=f"here.*({cause})"):
        Template(source, "here")


@given(st.text("{}%#|()[]'\" \nabn0*~-=if", max_size=40))
def test_any_text_is_a_template_or_is_refused(source: str) -> None:
    try:
        text = Template(source, "here").render({"n": 1, "a": [1], "b": "x"})
    except (ModelError, TemplateFault):
        return
    assert isinstance(text, str)


@pytest.mark.parametrize(
    "source",
    [
        "  {% if messages %}\n  x\n  {% endif %}\n  y",  # blocks are trimmed
        "{{ {'a': '<\u00e9>', 'b': [1, 2.5, none, true]} | tojson }}",
        "{{ messages | tojson(indent=2, separators=(',', ':'), ensure_ascii=true, sort_keys=true) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
        "{{ messages[0].missing }}{{ unknown is defined }}{{ add_generation_prompt }}",
        "{{ '\\n' }}{{- ' a ' | trim }}\n",
    ],
)
def test_a_template_means_what_it_means_to_transformers(source: str) -> None:
    messages = [*USER, {"role": "assistant", "content": "<b>"}]
    expected = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)[0][0]
    assert Template(source, "here").render({"messages": messages, "add_generation_prompt": True}) == expected


def test_the_names_that_a_template_reads_are_known() -> None:
    source = (
        "{% set own = 1 %}{% for m in messages %}{{ m.x }}{{ range(2) }}{{ own }}{% endfor %}{{ thinking is true }}"
    )
    assert Template(source, "here").reads == {"messages", "thinking"}


def test_threads_get_each_their_own_text() -> None:
    doubled = Template("{{ n * 2 }}", "here")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: doubled.render({"n": n}), range(200))) == [str(2 * n) for n in range(200)]


def test_a_killed_process_is_replaced() -> None:
    one = Template("{{ n }}", "here")
    process = template._SANDBOX._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert one.render({"n": 2}) == "2"


def test_a_process_that_ends_amid_a_request_costs_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Template("{{ n }}", "here")
    process = template._SANDBOX._process
    assert process is not None
    process.kill()
    process.wait()
    with monkeypatch.context() as patch:
        patch.setattr(process, "poll", lambda: None)  # as if it died after the look
        with pytest.raises(TemplateFault, match="ended with status -9"):
            one.render({"n": 1})
    assert one.render({"n": 2}) == "2"


def test_a_fork_has_a_process_of_its_own() -> None:
    one = Template("{{ n }}", "here")
    before = template._SANDBOX._process
    template._SANDBOX._owner = -1  # as a fork finds it
    assert one.render({"n": 1}) == "1" and template._SANDBOX._process is not before
    assert before is not None
    before.communicate()
