"""The model families whose conversations this engine knows by itself: how to recognise one, what ends its turns, its
markup.

The one idea: a family is recognised by its control tokens' names, never by ids, which its members renumber. Stop tokens
are added to what the configs declare: Kimi's configs name [EOS] alone while its turns end with <|im_end|>, so that
trusting them runs on past the answer.

The markup here serves directories without a template of their own. Sources: the chat templates and model cards that
Moonshot and DeepSeek publish; what sets R1 and V3.1 apart is that V3's tokenizer has placeholders for <think>, and
R1's for the search tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

TEMPLATES: Final = Path(__file__).parent / "assets" / "templates"

_KIMI: Final = ("[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
_THINK: Final = ("<think>", "</think>")
# U+FF5C and U+2581 stand for the bar and the space in DeepSeek's names.
_BEGIN, _END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
_DEEPSEEK: Final = (_BEGIN, _END, "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
_SEARCH: Final = ("<\uff5csearch\u2581begin\uff5c>", "<\uff5csearch\u2581end\uff5c>")
_KIMI_SYSTEM: Final = "You are Kimi, an AI assistant created by Moonshot AI."


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: a tokenizer that has all of `control_tokens`, in a directory whose config.json has one of `model_types`
    (any if empty), is of this family. `stops` end its turns. Its markup is the file `markup` with the variables
    `constants`, for conversations that may set `switches`. `typescript_tools`: it reads tools as TypeScript, not as
    JSON. `numbers_calls`: it knows tool calls by functions.NAME:NUMBER and by no other id."""

    name: str
    control_tokens: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    stops: tuple[str, ...]
    markup: str
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    switches: frozenset[str] = frozenset()
    typescript_tools: bool = False
    numbers_calls: bool = False


# The first row that fits counts.
FAMILIES: Final = (
    Family(
        name="Kimi-K2.5",
        control_tokens=_KIMI + _THINK,
        model_types=("kimi_k25",),
        stops=("<|im_end|>", "[EOS]"),
        markup="kimi.jinja",
        constants={"kind": "k2.5", "default_system": _KIMI_SYSTEM, "thinking": True},
        switches=frozenset({"thinking", "preserve_thinking"}),
        typescript_tools=True,
        numbers_calls=True,
    ),
    Family(
        name="Kimi-K2-Thinking",
        control_tokens=_KIMI + _THINK,
        stops=("<|im_end|>", "[EOS]"),
        markup="kimi.jinja",
        constants={"kind": "k2-thinking", "default_system": _KIMI_SYSTEM, "thinking": True},
        numbers_calls=True,
    ),
    Family(
        name="Kimi-K2",
        control_tokens=_KIMI,
        stops=("<|im_end|>", "[EOS]"),
        markup="kimi.jinja",
        constants={"kind": "k2", "default_system": "You are a helpful assistant"},
        numbers_calls=True,
    ),
    Family(
        name="DeepSeek-V3.1",
        control_tokens=_DEEPSEEK + _THINK + _SEARCH,
        stops=(_END,),
        markup="deepseek.jinja",
        constants={"kind": "v3.1"},
        switches=frozenset({"thinking"}),
    ),
    Family(
        name="DeepSeek-R1",
        control_tokens=_DEEPSEEK + _THINK,
        stops=(_END,),
        markup="deepseek.jinja",
        constants={"kind": "r1"},
    ),
    Family(
        name="DeepSeek-V3",
        control_tokens=_DEEPSEEK,
        stops=(_END,),
        markup="deepseek.jinja",
        constants={"kind": "v3"},
    ),
)


def find_family(control_tokens: Mapping[str, int], config: Mapping[str, Any]) -> Family | None:
    """The family of a tokenizer with these control tokens, in a directory with this config.json; None if unknown."""
    kind = config.get("model_type")
    for family in FAMILIES:
        if control_tokens.keys() >= set(family.control_tokens) and kind in (family.model_types or (kind,)):
            return family
    return None
