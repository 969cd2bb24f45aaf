"""Published drafter formats: how each is told apart, what its config fields mean, and what stands in their place.

The one idea: what differs between projects is data. FORMATS, STRANGERS, FIELDS and REFUSED are tables, a row for a
fact, its source beside it; `describe` reads a config by them. Every value is looked up everywhere it may stand, tensor
shapes included; sources that disagree are an error that shows both, and a field that is missing is taken from the
tensors before any default. Which states are read is boundary.py's part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from minieagle.models.config import ConfigError, TargetConfig, Yarn
from minieagle.models.drafter_config import LatentSizes
from minieagle.models.drafter_names import DrafterShapes, official_name
from minieagle.spec.boundary import Convention

Shape = tuple[int, ...]
Raw = Mapping[str, Any]
NormOutput = Literal["feedback", "head"]

OWN = "minieagle_eagle3"


class UndecidedError(ConfigError):
    """A field that two projects write with different meanings, and nothing says which is meant."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One published format. `architectures` or `key` (a field that no other format has) tell it.

    ids: what layer ids mean where the format defines it. norm_output: what its field of that name means: "feedback",
    the normed state is fed to the next step, or "head", the head reads the normed state; None where the format doesn't
    say. position_base: the position that training gave the first row.
    """

    name: str
    architectures: tuple[str, ...] = ()
    key: str | None = None
    ids: Convention | None = None
    norm_output: NormOutput | None = None
    position_base: int = 0


FORMATS: tuple[Format, ...] = (
    # speculators: models/eagle3/config.py; ids are vLLM's; eagle3/data.py:shift_batch drops the first position
    Format(name="speculators", key="speculators_model_type", ids="in", norm_output="feedback", position_base=1),
    # vLLM: eagle3_utils.get_eagle3_aux_layers_from_config takes ids as inputs; llama_eagle3.py for norm_output
    Format(name="vLLM", architectures=("Eagle3LlamaForCausalLM",), ids="in", norm_output="feedback"),
    # TorchSpec trains outputs and exports inputs for vLLM (tools/convert_to_hf.py) under one name: no meaning of ids.
    # norm_output: SGLang models/kimi_k25_eagle3.py and vLLM models/deepseek_eagle3.py
    Format(
        name="TorchSpec MLA",
        architectures=("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        norm_output="feedback",
    ),
    # Written by SpecForge, where norm_output is the head's (modeling/draft/llama3_eagle.py:1690) and ids are outputs,
    # and for SGLang, where it is the feedback's (models/llama_eagle3.py) and ids are either since #25454: no meaning
    Format(name="SpecForge", architectures=("LlamaForCausalLMEagle3",)),
    # The official checkpoints list no ids; Model-Optimizer's exports share the name and list outputs or inputs
    Format(name="EAGLE", architectures=("LlamaForCausalLM", "Eagle3ForCausalLM")),
)


@dataclass(frozen=True)
class Stranger:
    """What else is published as a drafter: told by a word in its architecture or type, or by its tensors."""

    name: str
    words: tuple[str, ...] = ()
    tensors: str | None = None


STRANGERS: tuple[Stranger, ...] = (
    Stranger("a DFlash drafter", ("dflash",)),  # vLLM qwen3_dflash.py: a block is drafted at once
    Stranger("a DSpark drafter", ("dspark",)),
    Stranger("a P-EAGLE drafter", ("peagle", "p_eagle")),  # parallel drafting with a mask state
    Stranger("a Medusa drafter", ("medusa",), r"(medusa_head\.)?\d+\.(\d+\.linear|linear)\.weight"),
    Stranger("an MLP speculator", ("mlpspeculator", "mlp_speculator")),
    Stranger("a multi-token-prediction layer", ("mtp", "nextn"), r".*\b(eh_proj|enorm|hnorm)\.weight"),
)

# Where a field may stand: top level, Model-Optimizer's and SpecForge's eagle_config, speculators' nested llama config.
PLACES = ("", "eagle_config", "transformer_layer_config")


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of DrafterConfig, other spellings of it, and its value where neither config nor tensors say it.

    shape: the attribute of DrafterShapes that says the same."""

    name: str
    also: tuple[str, ...] = ()
    shape: str | None = None
    default: Any = None


FIELDS: tuple[Field, ...] = (
    Field(name="hidden_size", shape="hidden_size"),
    Field(name="intermediate_size", shape="intermediate_size"),
    Field(name="num_hidden_layers", shape="num_hidden_layers"),
    Field(name="num_attention_heads"),
    Field(name="max_position_embeddings", default=2048),  # transformers' LlamaConfig
    Field(name="rms_norm_eps", default=1e-6),  # transformers' LlamaConfig and DeepseekV3Config
    Field(name="norm_before_residual", default=False),  # all trainers; vLLM's speculators reader alone assumes true
    Field(name="norm_before_fc", shape="norm_before_fc"),
    Field(name="fc_norm", also=("use_aux_norm",), shape="fc_norm"),  # the second is vLLM's and SGLang's legacy name
    Field(name="qk_norm", shape="qk_norm"),
    Field(name="own_embeddings", shape="own_embeddings"),
    Field(name="own_head", shape="own_head"),
)

# Fields that change the math, and the values that are implemented.
REFUSED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),  # of fc, in vLLM and SGLang
    "tie_word_embeddings": (False,),
    "partial_rotary_factor": (1, 1.0),
    "use_sliding_window": (False,),
    "logit_scale": (1, 1.0),
    "attn_output_gate": (False,),
    "rope_interleave": (True, False),
    "parallel_drafting": (False,),
    "parallel_draft_step": (1,),  # Model-Optimizer
    "use_aux_hidden_state": (True,),  # the rest is Model-Optimizer's: false is an EAGLE-1 or MTP head
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}

# The same of a rope description.
ROPE_REFUSED: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "attention_factor": (),
    "mrope_section": (),
    "truncate": (True,),
}
YARN = ("yarn", "deepseek_yarn")  # the second is vLLM's name of the same


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a config and its tensors say, without the boundaries: fields of DrafterConfig, where each comes from, and
    what a user should know."""

    format: Format
    fields: dict[str, Any]
    sources: dict[str, str]
    notes: tuple[str, ...]


def refuse_strangers(config: Raw, shapes: Mapping[str, Shape]) -> None:
    """Raises ConfigError naming what the directory holds when it is a drafter of another kind. shapes: of every tensor,
    by its stored name."""
    names = {official_name(name) for name in shapes}
    said = " ".join(str(config.get(name, "")) for name in ("architectures", "model_type", "speculators_model_type"))
    for stranger in STRANGERS:
        worded = any(word in said.lower() for word in stranger.words)
        if worded or _any_match(stranger.tensors, names):
            raise ConfigError(f"the directory holds {stranger.name}, not an EAGLE-3 drafter: only EAGLE-3 is supported")
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ConfigError(f"the directory holds a speculators drafter of type {kind!r}: only 'eagle3' is supported")
    fc = next((tuple(shape) for name, shape in shapes.items() if official_name(name) == "fc.weight"), None)
    if fc is None and names and "midlayer.hidden_norm.weight" not in names:
        raise ConfigError("the directory holds no fc.weight, which fuses the target's states: it is no EAGLE-3 drafter")
    if fc is not None and len(fc) == 2 and fc[1] == 2 * fc[0] and "midlayer.hidden_norm.weight" not in names:
        raise ConfigError(
            f"the directory holds an EAGLE-1 or EAGLE-2 drafter (fc.weight {list(fc)} joins embedding and state, and "
            "there is no hidden_norm): only EAGLE-3 is supported"
        )


def _any_match(pattern: str | None, names: Iterable[str]) -> bool:
    return pattern is not None and any(re.fullmatch(pattern, name) for name in names)


def recognise(config: Raw) -> Format:
    """The format of a foreign config.json. Raises ConfigError when it is none of FORMATS."""
    listed = config.get("architectures")
    named = cast("list[Any]", listed) if isinstance(listed, list) else []
    for known in FORMATS:
        if (known.key is not None and known.key in config) or any(name in known.architectures for name in named):
            return known
    known_names = [name for row in FORMATS for name in row.architectures]
    raise ConfigError(
        f"the drafter's config.json has architectures={listed!r}: not known, so nobody can say what its fields mean; "
        f"known: {known_names} and speculators' own"
    )


def describe(config: Raw, shapes: DrafterShapes, target: TargetConfig, kind: Format) -> Description:
    """Read a foreign config by the tables. Raises ConfigError for sources that disagree, for math that is not
    implemented, and for what nobody says."""
    reader = _Reader(config)
    reader.refuse()
    for field in FIELDS:
        reader.take(field.name, *field.also, tensors=getattr(shapes, field.shape) if field.shape else None)
        reader.default(field.name, field.default)
    taps = shapes.taps(target.hidden_size)
    reader.check("num_aux_hidden_states", tensors=taps)
    reader.take("target_hidden_size", tensors=target.hidden_size)
    reader.take("vocab_size", tensors=shapes.vocab_size)
    reader.default("vocab_size", target.vocab_size)
    reader.take("draft_vocab_size", tensors=shapes.draft_vocab_size)
    reader.default("draft_vocab_size", reader.fields["vocab_size"])
    _heads(reader, shapes)
    _rope(reader)
    _norms(reader, kind)
    _dtype(reader)
    return Description(format=kind, fields=reader.fields, sources=reader.sources, notes=tuple(reader.notes))


class _Reader:
    """Mutable: a config being read, the fields gathered so far, and where each comes from."""

    def __init__(self, config: Raw) -> None:
        self.config = config
        self.fields: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.notes: list[str] = []
        for place in PLACES[1:]:
            if not isinstance(config.get(place) or {}, Mapping):
                raise ConfigError(f"the drafter's config.json: {place} is {config[place]!r}, not an object")

    def seen(self, *names: str) -> dict[str, Any]:
        """Path -> value, wherever one of the names stands; null is absent."""
        found: dict[str, Any] = {}
        for place in PLACES:
            inside = cast(Raw, (self.config.get(place) or {}) if place else self.config)
            paths = {name: f"{place}.{name}" if place else name for name in names}
            found |= {paths[name]: inside[name] for name in names if inside.get(name) is not None}
        return found

    def check(self, *names: str, tensors: Any = None) -> tuple[Any, str] | None:
        """The one value of a field and its source; raises when sources disagree. tensors: what the shapes say."""
        found = self.seen(*names)
        if tensors is not None:
            found["the tensors"] = tensors
        return agreed(names[0], found)

    def take(self, *names: str, tensors: Any = None) -> None:
        """Read a field, named first; nothing when nobody says it."""
        value = self.check(*names, tensors=tensors)
        if value is not None:
            self.fields[names[0]], self.sources[names[0]] = value

    def default(self, name: str, value: Any) -> None:
        if name in self.fields:
            return
        if value is None:
            raise ConfigError(f"neither the drafter's config.json nor its tensors say {name}: add it to config.json")
        self.put(name, value, "default")

    def put(self, name: str, value: Any, source: str) -> None:
        self.fields[name], self.sources[name] = value, source

    def refuse(self) -> None:
        """Raises for fields of REFUSED with a value that is not implemented, and for sliding windows."""
        for name, allowed in REFUSED.items():
            for path, value in self.seen(name).items():
                if value not in allowed:
                    raise ConfigError(
                        f"the drafter's config.json: {path}={value!r} is not supported; known: {list(allowed)}"
                    )
        for path, kinds in self.seen("layer_types").items():
            if not isinstance(kinds, list) or set(map(str, cast("list[Any]", kinds))) - {"full_attention"}:
                raise ConfigError(
                    f"the drafter's config.json: {path}={kinds!r} is not supported; known: 'full_attention'"
                )


def agreed(name: str, found: Mapping[str, Any]) -> tuple[Any, str] | None:
    """The value that all sources give and the names of the sources; None without any. Raises ConfigError showing all
    when two differ."""
    if not found:
        return None
    first = next(iter(found.values()))
    if any(value != first for value in found.values()):
        listed = ", ".join(f"{path} {value!r}" for path, value in found.items())
        raise ConfigError(f"the drafter contradicts itself on {name}: {listed}; find out which is right and mend it")
    return first, " and ".join(found)


def _heads(reader: _Reader, shapes: DrafterShapes) -> None:
    """Head counts and widths, which the shapes give once the number of heads is known."""
    heads = reader.fields["num_attention_heads"]
    if shapes.latent:
        _latent(reader, shapes, heads)
        return
    reader.take("head_dim", tensors=_share(shapes.query_width, heads, "q_proj"))
    assert shapes.key_value_width is not None, "attention without a latent has a key width"
    reader.take(
        "num_key_value_heads", tensors=_share(shapes.key_value_width, reader.fields["head_dim"], "k_proj of head_dim")
    )
    reader.put("rope_style", "half", "llama attention")  # transformers' rotate_half, vLLM's neox style


def _latent(reader: _Reader, shapes: DrafterShapes, heads: int) -> None:
    sizes: dict[str, int | None] = {}
    whole = _share(shapes.query_width, heads, "q_b_proj")
    rope = shapes.qk_rope_head_dim
    assert rope is not None, "latent attention has rotary columns"
    told = {
        "q_lora_rank": shapes.q_lora_rank,
        "kv_lora_rank": shapes.kv_lora_rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": whole - rope,
        "v_head_dim": _share(shapes.value_width, heads, "o_proj"),
    }
    for name, tensors in told.items():
        value = reader.check(name, tensors=tensors)
        sizes[name] = None if value is None else value[0]
    reader.put("latent", LatentSizes(**cast("dict[str, Any]", sizes)), "the tensors")
    reader.put("num_key_value_heads", heads, "latent attention")
    reader.put("head_dim", whole, "the tensors")
    interleaved = reader.check("rope_interleave")  # transformers' DeepseekV3Config
    style = "interleaved" if interleaved is None or interleaved[0] else "half"
    reader.put("rope_style", style, "latent attention" if interleaved is None else interleaved[1])


def _share(width: int, parts: Any, what: str) -> int:
    if type(parts) is not int or parts < 1 or width % parts:
        raise ConfigError(f"the drafter contradicts itself: {what} has {width} rows, no multiple of {parts!r}")
    return width // parts


def _rope(reader: _Reader) -> None:
    """Base and YaRN, from `rope_theta` + `rope_scaling` and from `rope_parameters`, at any place."""
    parts = reader.seen("rope_scaling", "rope_parameters")
    for path, part in parts.items():
        if not isinstance(part, Mapping):
            raise ConfigError(f"the drafter's config.json: {path} is {part!r}, not an object")
    thetas = reader.seen("rope_theta")
    thetas |= {f"{path}.rope_theta": part["rope_theta"] for path, part in parts.items() if part.get("rope_theta")}
    theta = agreed("rope_theta", thetas) or (10000.0, "default")  # transformers' LlamaConfig
    reader.put("rope_theta", *theta)
    scaling = agreed("rope scaling", {path: _scaling(path, part) for path, part in parts.items()})
    yarn, source = scaling or (None, "default")
    if yarn is not None and not {"factor", "original_max_position_embeddings"} <= yarn.keys():
        raise ConfigError(f"the drafter's config.json: {source} needs factor and original_max_position_embeddings")
    reader.put("yarn", None if yarn is None else Yarn(**yarn), source)


def _scaling(path: str, part: Raw) -> dict[str, Any] | None:
    """The numbers of YaRN in a rope description, None for plain rotation."""
    kinds = [part[name] for name in ("rope_type", "type") if part.get(name) is not None]
    if any(kind not in ("default", *YARN) or kind != kinds[0] for kind in kinds):
        raise ConfigError(f"the drafter's config.json: {path} is of type {kinds}; known: 'default', 'yarn'")
    for name, allowed in ROPE_REFUSED.items():
        if part.get(name) is not None and part[name] not in allowed:
            raise ConfigError(f"the drafter's config.json: {path}.{name}={part[name]!r} is not supported")
    if not kinds or kinds[0] == "default":
        return None
    return {name: part[name] for name in Yarn.__dataclass_fields__ if part.get(name) is not None}


def _norms(reader: _Reader, kind: Format) -> None:
    """What `norm_output` means here: see Format."""
    found = reader.check("norm_output")
    reader.put("norm_output", False, "default")
    reader.put("norm_before_head", True, "default")
    if found is None:
        return
    if kind.norm_output is None:
        raise UndecidedError(
            f"the drafter's config.json: norm_output={found[0]!r} means that the state is normed before it is fed back "
            "in SGLang and vLLM, and before the head in SpecForge; nothing says which: remove it if the drafter "
            "is a plain EAGLE-3 one, or let `minieagle doctor --fix` measure it"
        )
    field = "norm_output" if kind.norm_output == "feedback" else "norm_before_head"
    reader.put(field, found[0], f"{found[1]}, which means {kind.norm_output} in {kind.name}")


def _dtype(reader: _Reader) -> None:
    """float16 is read into bfloat16: no engine runs a drafter in another type than its target's."""
    named = reader.seen("dtype", "torch_dtype")
    value = str(next(iter(named.values()), "bfloat16")).removeprefix("torch.")
    if value == "float16":
        reader.notes.append("the drafter's weights are float16 and are computed with in the target's type")
        value = "bfloat16"
    reader.put("dtype", value, next(iter(named), "default"))
