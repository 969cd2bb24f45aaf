"""Every published kind of target, in a tiny size with its quirks: logits equal transformers' DeepSeek-V3.

The checkpoints are written here from the published tables of names and shapes, by a writer of a dozen lines that shares
no code with the engine, nor with transformers, nor with the safetensors library. transformers reads a plain float32
copy: its own FP8 stretches partial blocks, which is a fault that this file also shows to be noticed.
"""

from __future__ import annotations

import json
import logging
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV32ForCausalLM, Glm4MoeLiteForCausalLM

from minieagle.models import target_weights
from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError
from minieagle.models.int4 import Int4Linear
from minieagle.models.target_weights import load_target
from tests.oracles import Oracle, Tensors
from tests.strategies import Run, an_expert, target_configs, tokens

CLOSE = 2e-4
NUM_TOKENS = 12
Json = dict[str, Any]

# ---- the models: fields as the published files have them, small

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V3: Json = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "max_position_embeddings": 640,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    # What does nothing at inference and stands in every published file.
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "pretraining_tp": 1,
    "seq_aux": True,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
K2 = V3 | {
    "model_type": "kimi_k2",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}
K25_TEXT = K2 | {"rms_norm_eps": 1e-5, "rope_scaling": YARN | {"factor": 64.0}}
MOONLIGHT = K2 | {
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "routed_scaling_factor": 2.446,
    "rope_scaling": None,
}
GLM = {
    **{name: value for name, value in V3.items() if name not in ("scoring_func", "moe_layer_freq", "rope_theta")},
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 1.0},
    "num_nextn_predict_layers": 1,
}
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 2048,
}
# No size is a multiple of 128: 152 rows of kv_a are one whole block and 24 rows of another.
WIDE = {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 136, "q_lora_rank": 144}
WIDE |= {"kv_lora_rank": 136, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 40}
FP8: Json = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}
FP8_UE8M0 = {"quantization_config": FP8["quantization_config"] | {"scale_fmt": "ue8m0"}}
INT4: Json = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "actorder": None,
                    "observer": "minmax",
                },
            }
        },
    }
}


def wrapped(text: Json, model_type: str, architecture: str, quantization: Json) -> Json:
    """Kimi-K2.5's config.json: the language model inside, a vision tower beside, the quantisation block in both."""
    vision = {"model_type": "moonvit", "patch_size": 14, "vt_hidden_size": 32}
    outer = {"architectures": [architecture], "model_type": model_type, "vision_config": vision, "dtype": "bfloat16"}
    return outer | {"text_config": text | quantization, "tie_word_embeddings": False} | quantization


# ---- the weights, from the published table of names and shapes


def attention_shapes(text: Json) -> dict[str, tuple[int, ...]]:
    heads, nope, rope, value = (
        text[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    hidden, q_rank, kv_rank = text["hidden_size"], text["q_lora_rank"], text["kv_lora_rank"]
    query: dict[str, tuple[int, ...]] = {"q_proj": (heads * (nope + rope), hidden)}
    if q_rank:
        query = {"q_a_proj": (q_rank, hidden), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * (nope + rope), q_rank)}
    return query | {
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }


def mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    up, down = (inner, hidden), (hidden, inner)
    return {f"{prefix}.gate_proj": up, f"{prefix}.up_proj": up, f"{prefix}.down_proj": down}


def layer_shapes(text: Json, index: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    shapes = {f"self_attn.{name}": shape for name, shape in attention_shapes(text).items()}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if index < text["first_k_dense_replace"]:
        return shapes | mlp_shapes("mlp", hidden, text["intermediate_size"])
    for e in range(text["n_routed_experts"]):
        shapes |= mlp_shapes(f"mlp.experts.{e}", hidden, inner)
    shapes |= {"mlp.gate": (text["n_routed_experts"], hidden)}
    return shapes | mlp_shapes("mlp.shared_experts", hidden, inner * text["n_shared_experts"])


def weights(text: Json) -> Tensors:
    """A random model in bfloat16 under the published names: norms around 1, router biases that matter, in float32."""
    hidden, vocab, layers = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    shapes |= {"lm_head": (vocab, hidden)}
    for index in range(layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(text, index).items()}
    draw = torch.Generator().manual_seed(0)
    made = {f"{name}.weight": drawn(shape, draw) for name, shape in shapes.items()}
    for index in range(text["first_k_dense_replace"], layers):
        name = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
        made[name] = 0.3 * torch.randn(text["n_routed_experts"], generator=draw)
    return made


def drawn(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return (0.5 + torch.rand(shape, generator=draw)).bfloat16()
    return (1.2 * shape[1] ** -0.5 * torch.randn(shape, generator=draw)).bfloat16()


# ---- the quantised forms, each with its own plain meaning


def fp8_meaning(codes: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """The reference: every block times its scale, whatever is left of the last one."""
    out, (rows, columns) = codes.float(), block
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            out[rows * i : rows * (i + 1), columns * j : columns * (j + 1)] *= scale[i, j]
    return out


def fp8(
    name: str, weight: Tensor, draw: torch.Generator, block: tuple[int, int] = (128, 128)
) -> tuple[Tensors, Tensor]:
    blocks = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    scale = (0.5 + torch.rand(blocks, generator=draw)) / 64
    codes = (weight.float() * 64).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, fp8_meaning(codes, scale, block)


def int4(name: str, weight: Tensor, draw: torch.Generator) -> tuple[Tensors, Tensor]:
    """Any codes and scales make a weight of about the right size; eight codes a word, the first in the lowest bits."""
    out, columns = weight.shape
    codes = torch.randint(-8, 8, (out, columns), generator=draw)
    scale = ((0.5 + torch.rand(out, columns // 32, generator=draw)) * 0.25 * columns**-0.5).bfloat16()
    words = [[sum((code + 8) << 4 * k for k, code in enumerate(row[j : j + 8])) for j in range(0, columns, 8)]
             for row in codes.tolist()]  # fmt: skip
    packed = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    stored = {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": torch.tensor([out, columns])}
    return stored, codes * scale.float().repeat_interleave(32, dim=1)


def quantise(
    plain: Tensors, form: Callable[..., tuple[Tensors, Tensor]], where: tuple[str, ...]
) -> tuple[Tensors, Tensors]:
    """The stored tensors, and the plain float32 ones that they mean."""
    draw, stored, meant = torch.Generator().manual_seed(1), Tensors(), Tensors()
    for name, weight in plain.items():
        if name.endswith(("_proj.weight", "_with_mqa.weight")) and any(part in name for part in where):
            parts, meant[name] = form(name, weight, draw)
            stored |= parts
        else:
            stored[name], meant[name] = weight, weight.float()
    return stored, meant


# ---- what else the files hold


def prediction_layer(text: Json) -> Tensors:
    """A multi-token-prediction layer, with its copies of the embedding and the head."""
    index, hidden, draw = text["num_hidden_layers"], text["hidden_size"], torch.Generator().manual_seed(2)
    shapes = layer_shapes(text, index) | {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    shapes |= {name: (text["vocab_size"], hidden) for name in ("embed_tokens", "shared_head.head")}
    shapes |= {"shared_head.norm": (hidden,)}
    made = {f"model.layers.{index}.{name}.weight": drawn(shape, draw) for name, shape in shapes.items()}
    return made | {f"model.layers.{index}.mlp.gate.e_score_correction_bias": torch.zeros(text["n_routed_experts"])}


def indexers(text: Json) -> Tensors:
    draw, width, heads = torch.Generator().manual_seed(3), text["index_head_dim"], text["index_n_heads"]
    shapes = {"wq_b.weight": (heads * width, text["q_lora_rank"]), "wk.weight": (width, text["hidden_size"])}
    shapes |= {"weights_proj.weight": (heads, text["hidden_size"]), "k_norm.weight": (width,), "k_norm.bias": (width,)}
    layers = range(text["num_hidden_layers"])
    return {f"model.layers.{i}.self_attn.indexer.{n}": drawn(s, draw) for i in layers for n, s in shapes.items()}


def rotary_buffers(text: Json) -> Tensors:
    return {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(text["num_hidden_layers"])}


def vision(projector: str) -> Tensors:
    names = ("vision_tower.encoder.blocks.0.wqkv.weight", "vision_tower.patch_embed.pos_emb.weight")
    return dict.fromkeys((*names, f"{projector}.proj.0.weight"), torch.ones(6, 4).bfloat16())


def prefixed(tensors: Tensors) -> Tensors:
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


# ---- the published kinds

EVERYWHERE, ROUTED = ("self_attn.", "mlp."), (".mlp.experts.",)


@dataclass(frozen=True)
class Published:
    """config.json and tensors as published; the language model's fields, and the tensors' plain meaning."""

    config: Json
    tensors: Tensors
    text: Json
    meant: Tensors


def plain(text: Json, *beside: Tensors) -> Published:
    stored = weights(text)
    meant = {name: tensor.float() for name, tensor in stored.items()}
    return Published(text, stored | {n: t for more in beside for n, t in more.items()}, text, meant)


def in_fp8(text: Json, described: Json, *, predicts: bool = False) -> Published:
    text = text | WIDE
    stored, meant = quantise(weights(text), fp8, EVERYWHERE)
    more = quantise(prediction_layer(text), fp8, EVERYWHERE)[0] if predicts else {}
    return Published(text | described, stored | more, text, meant)


def in_int4(text: Json, *, nested: bool) -> Published:
    stored, meant = quantise(weights(text), int4, ROUTED)
    if not nested:
        return Published(text | INT4, stored, text, meant)
    config = wrapped(text, "kimi_k25", "KimiK25ForConditionalGeneration", INT4)
    return Published(config, prefixed(stored) | vision("mm_projector"), text, meant)


def kimi_vl() -> Published:
    bare = plain(MOONLIGHT)
    config = wrapped(MOONLIGHT, "kimi_vl", "KimiVLForConditionalGeneration", {})
    return Published(config, prefixed(bare.tensors) | vision("multi_modal_projector"), MOONLIGHT, bare.meant)


def respelled() -> Published:
    """As transformers 5 writes it: one rope_parameters with the base inside, no rope_scaling."""
    bare = plain(V3)
    new = {name: value for name, value in V3.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    rope = {name: value for name, value in YARN.items() if name != "type"} | {"rope_type": "yarn", "rope_theta": 10000}
    return Published(new | {"rope_parameters": rope, "dtype": "bfloat16"}, bare.tensors, V3, bare.meant)


def v32() -> Published:
    """Norms in float32, an indexer in every layer, and the prediction layer behind."""
    made = plain(V32 | {"num_nextn_predict_layers": 1}, indexers(V32), prediction_layer(V32))
    norms = {name: tensor.float() for name, tensor in made.tensors.items() if name.endswith("layernorm.weight")}
    return Published(made.config, made.tensors | norms, made.text, made.meant)


PUBLISHED: dict[str, Callable[[], Published]] = {
    "DeepSeek-V3 in bf16": lambda: plain(V3, rotary_buffers(V3)),
    "DeepSeek-V3 in FP8": lambda: in_fp8(V3 | {"num_nextn_predict_layers": 1}, FP8, predicts=True),
    "DeepSeek-V3.1": lambda: in_fp8(V3, FP8_UE8M0),
    "DeepSeek-V3, prediction layer undeclared": lambda: plain(V3, prediction_layer(V3)),
    "DeepSeek-V3, rope_parameters": respelled,
    "DeepSeek-V3.2": v32,
    "Kimi-K2": lambda: in_fp8(K2, FP8),
    "Kimi-K2-Thinking": lambda: in_int4(K2 | {"rms_norm_eps": 1e-5}, nested=False),
    "Kimi-K2.5": lambda: in_int4(K25_TEXT, nested=True),
    "Moonlight": lambda: plain(MOONLIGHT),
    "Kimi-VL": kimi_vl,
    "GLM-4.7-Flash": lambda: plain(GLM, prediction_layer(GLM)),
}

# ---- the writer

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8"}


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Length of the header, the header, the bytes (the format's description in the safetensors repository)."""
    header, at = Json(), 0
    for name, tensor in tensors.items():
        place = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        header[name], at = place, at + tensor.nbytes
    text = json.dumps(header).encode()
    data = [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def write(directory: Path, config: Json, tensors: Tensors) -> Path:
    """config.json, two files, and the index: a layer's tensors are spread over both."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    listed = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        write_safetensors(directory / file, {name: tensors[name] for name in tensors if listed[name] == file})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return directory


def written(made: Published, directory: Path, **tensors: Tensor) -> Path:
    return write(directory / "published", made.config, made.tensors | tensors)


# ---- against transformers


def oracle(made: Published, directory: Path, **changes: Any) -> Oracle:
    """transformers' DeepSeek-V3 over the plain float32 meaning."""
    text = made.text | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32"}
    del text["torch_dtype"]
    path = directory / "plain"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(text | changes))
    write_safetensors(path / "model.safetensors", made.meant)
    return Oracle(path)


def logits(directory: Path) -> Tensor:
    return Run(load_target(directory, dtype=torch.float32), NUM_TOKENS).forward(tokens(NUM_TOKENS, 0)).logits


def distance(got: Tensor, wanted: Tensor) -> float:
    return (got - wanted).abs().max().item()


@pytest.mark.parametrize("kind", PUBLISHED)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    made = PUBLISHED[kind]()
    theirs, token_ids = oracle(made, tmp_path), tokens(NUM_TOKENS, 0).tolist()
    assert theirs.is_decided(token_ids), "another seed is needed: two experts tie"
    wanted = theirs.run(token_ids).logits
    assert wanted.std() > 0.3, "logits that hardly differ prove nothing"
    assert distance(logits(written(made, tmp_path)), wanted) < CLOSE


@pytest.mark.parametrize(
    ("kind", "model"), [("DeepSeek-V3.2", DeepseekV32ForCausalLM), ("GLM-4.7-Flash", Glm4MoeLiteForCausalLM)]
)
@torch.no_grad()
def test_logits_equal_transformers_own_class(kind: str, model: Any, tmp_path: Path) -> None:
    """V3.2's indexer runs there, and chooses every token of a short text; GLM's own class is no DeepSeek-V3."""
    path = written(PUBLISHED[kind](), tmp_path)
    wanted = model.from_pretrained(path, dtype=torch.float32).eval()(tokens(NUM_TOKENS, 0)[None]).logits[0]
    assert distance(logits(path), wanted) < CLOSE


@settings(max_examples=15)
@given(target_configs(), st.tuples(st.integers(1, 70), st.integers(1, 70)), st.booleans())
def test_fp8_of_any_shape_is_its_plain_copy(changes: Json, block: tuple[int, int], nested: bool) -> None:
    """Every branch of the architecture, in blocks that fit nothing, bare or wrapped: the same bits."""
    text = V3 | changes
    stored, meant = quantise(weights(text), partial(fp8, block=block), EVERYWHERE)
    described = {"quantization_config": FP8["quantization_config"] | {"weight_block_size": list(block)}}
    config = wrapped(text, "kimi_k25", "KimiK25ForConditionalGeneration", described) if nested else text | described
    config |= {"tie_word_embeddings": text["tie_word_embeddings"]}
    with tempfile.TemporaryDirectory() as place:
        quantised = write(Path(place) / "fp8", config, prefixed(stored) if nested else stored)
        assert torch.equal(logits(quantised), logits(write(Path(place) / "plain", text, meant)))


@pytest.mark.parametrize("kind", ["Kimi-K2-Thinking", "Kimi-K2.5"])
def test_int4_experts_stay_packed(kind: str, tmp_path: Path) -> None:
    target = load_target(written(PUBLISHED[kind](), tmp_path))
    assert isinstance(an_expert(target).down, Int4Linear) and target.dtype == torch.bfloat16


# ---- what is left out is said


def test_vision_is_left_out_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_target(written(PUBLISHED["Kimi-K2.5"](), tmp_path))
    assert r"vision tower and projector left out (3 tensors, 144 bytes)" in caplog.text


def test_the_indexer_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_target(written(PUBLISHED["DeepSeek-V3.2"](), tmp_path))
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["indexer left out (15 tensors" in record.getMessage() for record in warned] == [True]
    assert "2048" in warned[0].getMessage()


# ---- faults that must not pass


@pytest.mark.parametrize("part", ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "mlp.experts.0.down_proj"])
def test_a_wrong_scale_shows(part: str, tmp_path: Path) -> None:
    """One block of one weight, the partial last one, at twice its scale."""
    made = PUBLISHED["DeepSeek-V3 in FP8"]()
    scales = [n for n in made.tensors if n.endswith(f".{part}.weight_scale_inv")][:3]
    wrong = {name: made.tensors[name].clone() for name in scales}
    for scale in wrong.values():
        scale[-1, -1] *= 2
    right = logits(written(made, tmp_path))
    assert distance(logits(write(tmp_path / "wrong", made.config, made.tensors | wrong)), right) > CLOSE


def test_stretched_blocks_show(tmp_path: Path) -> None:
    """152 rows with 2 scales are 128 + 24, not 76 + 76."""
    made = PUBLISHED["DeepSeek-V3 in FP8"]()
    meant = dict(made.meant)
    for name in [n for n in meant if "kv_a_proj" in n]:
        codes, scale = made.tensors[name], made.tensors[f"{name}_scale_inv"]
        stretched = scale.repeat_interleave(codes.shape[0] // scale.shape[0], 0).repeat_interleave(128, 1)
        meant[name] = codes.float() * stretched[:, : codes.shape[1]]
    stretching = oracle(Published(made.config, made.tensors, made.text, meant), tmp_path)
    wanted = stretching.run(tokens(NUM_TOKENS, 0).tolist()).logits
    assert distance(logits(written(made, tmp_path)), wanted) > CLOSE


def test_a_prefix_left_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(PUBLISHED["Kimi-K2.5"](), tmp_path)
    monkeypatch.setattr(target_weights, "WRAPPER", "")
    with pytest.raises(CheckpointError, match="no tensor model"):
        load_target(path)


def test_a_prediction_layer_is_no_layer(tmp_path: Path) -> None:
    made = PUBLISHED["DeepSeek-V3, prediction layer undeclared"]()
    path = write(tmp_path / "deeper", made.config | {"num_hidden_layers": 4}, made.tensors)
    with pytest.raises(CheckpointError, match="no place for.*layers.3"):
        load_target(path)


@pytest.mark.parametrize("declared", [0, 1, None])
def test_a_model_is_not_cut_short(declared: int | None, tmp_path: Path) -> None:
    """One layer fewer in config.json than in the files: the last one is no prediction layer."""
    made = plain(V3)
    fields = {"num_hidden_layers": 2, "num_nextn_predict_layers": declared}
    with pytest.raises(CheckpointError, match="layer 2, config.json says num_hidden_layers=2"):
        load_target(write(tmp_path / "shallow", made.config | fields, made.tensors))


def test_no_more_prediction_layers_than_declared(tmp_path: Path) -> None:
    made = plain(V3, prediction_layer(V3), prediction_layer(V3 | {"num_hidden_layers": 4}))
    config = made.config | {"num_nextn_predict_layers": 1}
    with pytest.raises(CheckpointError, match="layer 4, .* num_nextn_predict_layers=1"):
        load_target(write(tmp_path / "more", config, made.tensors))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("DeepSeek-V3.1", {"weight_block_size": [64, 128]}),
        ("DeepSeek-V3.1", {"weight_block_size": None}),
        ("Kimi-K2.5", {"config_groups": {}}),
    ],
)
def test_a_block_that_files_or_copies_contradict_is_refused(kind: str, changes: Json, tmp_path: Path) -> None:
    made = PUBLISHED[kind]()
    config = made.config | {"quantization_config": made.config["quantization_config"] | changes}
    with pytest.raises((CheckpointError, ConfigError), match=f"{[*changes][0]}|scale_inv has shape"):
        load_target(write(tmp_path / "wrong", config, made.tensors))


@pytest.mark.parametrize(
    ("kind", "described", "named"),
    [
        ("DeepSeek-V3 in bf16", FP8, "states FP8 weights, but no tensor"),
        ("DeepSeek-V3 in bf16", INT4, "states INT4 weights, but no tensor"),
        ("DeepSeek-V3.1", {"quantization_config": None}, "no weight_block_size"),
    ],
)
def test_a_config_that_the_files_belie_is_refused(kind: str, described: Json, named: str, tmp_path: Path) -> None:
    made = PUBLISHED[kind]()
    with pytest.raises(CheckpointError, match=named):
        load_target(write(tmp_path / "wrong", made.config | described, made.tensors))


def test_packed_experts_need_no_config(tmp_path: Path) -> None:
    """The shapes alone say how many columns share a scale."""
    made = PUBLISHED["Kimi-K2-Thinking"]()
    path = write(tmp_path / "bare", made.text, made.tensors)
    assert torch.equal(logits(path), logits(written(made, tmp_path)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize("part", ["self_attn.o_proj", "self_attn.kv_b_proj", "mlp.experts.3.up_proj"])
def test_codes_without_a_scale_are_refused(dtype: torch.dtype, part: str, tmp_path: Path) -> None:
    made, name = plain(V3), f"model.layers.1.{part}.weight"
    with pytest.raises(CheckpointError, match=f"{name} is stored as {dtype}"):
        load_target(written(made, tmp_path, **{name: made.tensors[name].to(dtype)}))


@pytest.mark.parametrize("form", ["qweight", "weight_scale_2", "weight_packed"])
def test_other_formats_are_refused_by_name(form: str, tmp_path: Path) -> None:
    name = f"model.layers.1.self_attn.o_proj.{form}"
    with pytest.raises(CheckpointError, match=f"{name}: (AWQ or GPTQ|NVFP4|INT4)"):
        load_target(written(plain(V3), tmp_path, **{name: torch.ones(4, 4)}))
