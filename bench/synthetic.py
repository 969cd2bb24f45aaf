"""Write a synthetic INT4 checkpoint with random weights, large enough that Python overhead no longer dominates.

    python bench/synthetic.py DIR
    python bench/synthetic.py DIR --bf16 --set q_lora_rank=768

Writes DIR/target (pack-quantized INT4 experts, bf16 rest, one file a layer, an index), DIR/drafter (random, of fitting
shape: trees can be verified with it, but what it accepts means nothing) and, with --bf16, DIR/target-bf16 (the same
weights dequantised). The same seed and fields give the same bytes. Every product keeps its input's variance and the
ones that write to the residual stream are divided by sqrt(2 L), so that states grow slowly, as in a trained model. One
layer is in memory at a time, except for the drafter, whose head is copied from the loaded target.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.report import Report, new_parser
from bench.twin import write_twin
from minieagle.errors import ModelError
from minieagle.llm import embedded
from minieagle.models.config import TargetConfig, read_json, target_config
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.int4 import WORD
from minieagle.models.target_weights import load_target
from minieagle.quantize import quantization_config
from minieagle.spec.train import new_drafter, save_drafter

FIELDS: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
FIXED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "bfloat16",
}
GROUP_SIZE = 32
CODE_STD = (sum((q + 0.5) ** 2 for q in range(-8, 8)) / 16) ** 0.5
"""Standard deviation of codes drawn evenly from -8..7."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class Draws:
    """Random tensors of one file. Mutable: its generator moves on."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, out: int, width: int, gain: float = 1.0) -> Tensor:
        """[out, width] bf16 that keeps the variance of its input, times gain."""
        return (torch.randn(out, width, generator=self.generator) * gain * width**-0.5).bfloat16()

    def int4(self, name: str, out: int, width: int, gain: float = 1.0) -> dict[str, Tensor]:
        """The packed tensors of such a matrix: even codes, one scale for each group, a little different in each."""
        packed = torch.randint(-(2**31), 2**31, (out, width // WORD), generator=self.generator).int()
        spread = 0.8 + 0.4 * torch.rand(out, width // GROUP_SIZE, generator=self.generator)
        scale = (spread * gain / CODE_STD * width**-0.5).bfloat16()
        shape = torch.tensor([out, width], dtype=torch.int32)
        return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale, f"{name}.weight_shape": shape}


def _ones(width: int) -> Tensor:
    return torch.ones(width, dtype=torch.bfloat16)


def _attention(draws: Draws, config: TargetConfig, prefix: str, gain: float) -> dict[str, Tensor]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = heads * config.qk_head_dim
    tensors = {
        "kv_a_proj_with_mqa": draws.matrix(config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm": _ones(config.kv_lora_rank),
        "kv_b_proj": draws.matrix(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj": draws.matrix(hidden, heads * config.v_head_dim, gain),
    }
    if config.q_lora_rank is None:
        tensors["q_proj"] = draws.matrix(query, hidden)
    else:
        tensors["q_a_proj"] = draws.matrix(config.q_lora_rank, hidden)
        tensors["q_a_layernorm"] = _ones(config.q_lora_rank)
        tensors["q_b_proj"] = draws.matrix(query, config.q_lora_rank)
    return {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}


def _swiglu(draws: Draws, hidden: int, inner: int, prefix: str, gain: float) -> dict[str, Tensor]:
    return {
        f"{prefix}.gate_proj.weight": draws.matrix(inner, hidden),
        f"{prefix}.up_proj.weight": draws.matrix(inner, hidden),
        f"{prefix}.down_proj.weight": draws.matrix(hidden, inner, gain),
    }


def _experts(draws: Draws, config: TargetConfig, prefix: str, gain: float) -> dict[str, Tensor]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    tensors = {
        f"{prefix}.gate.weight": draws.matrix(config.n_routed_experts, hidden),
        f"{prefix}.gate.e_score_correction_bias": torch.zeros(config.n_routed_experts),
    }
    for expert in range(config.n_routed_experts):
        name = f"{prefix}.experts.{expert}"
        tensors |= draws.int4(f"{name}.gate_proj", inner, hidden) | draws.int4(f"{name}.up_proj", inner, hidden)
        tensors |= draws.int4(f"{name}.down_proj", hidden, inner, gain)
    if config.n_shared_experts:
        tensors |= _swiglu(draws, hidden, config.n_shared_experts * inner, f"{prefix}.shared_experts", gain)
    return tensors


def _layer(config: TargetConfig, index: int, seed: int) -> dict[str, Tensor]:
    draws, prefix, gain = Draws(seed), f"model.layers.{index}", (2 * config.num_hidden_layers) ** -0.5
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = {f"{prefix}.{name}.weight": _ones(config.hidden_size) for name in norms}
    tensors |= _attention(draws, config, f"{prefix}.self_attn", gain)
    if index < config.first_k_dense_replace:
        return tensors | _swiglu(draws, config.hidden_size, config.intermediate_size, f"{prefix}.mlp", gain)
    return tensors | _experts(draws, config, f"{prefix}.mlp", gain)


def _ends(config: TargetConfig, seed: int) -> dict[str, Tensor]:
    """Embeddings of unit variance, the final norm, and a head whose logits spread enough for a clear best token."""
    draws = Draws(seed)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=draws.generator).bfloat16()
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": _ones(config.hidden_size),
        "lm_head.weight": draws.matrix(config.vocab_size, config.hidden_size, gain=2.0),
    }


def files(config: TargetConfig, seed: int) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file, made when asked for. Every file has a seed of its own."""
    yield _ends(config, seed)
    for index in range(config.num_hidden_layers):
        yield _layer(config, index, seed + 1 + index)


def published_config(changes: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the synthetic model. Raises ModelError for a field that it does not have."""
    unknown = sorted(set(changes) - set(FIELDS))
    if unknown:
        raise ModelError(f"--set {unknown[0]}: no such field; known are {', '.join(FIELDS)}")
    fields = FIELDS | dict(changes)
    for name in ("hidden_size", "moe_intermediate_size"):
        if fields[name] % GROUP_SIZE:
            raise ModelError(f"{name}={fields[name]} must be a multiple of {GROUP_SIZE}, the INT4 group")
    ids = read_json(embedded("target") / "config.json")
    least = ids["vocab_size"]
    if fields["vocab_size"] < least:
        raise ModelError(f"vocab_size={fields['vocab_size']} must be at least {least}, the tokenizer's")
    shared = {name: ids[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    heads = {"num_key_value_heads": fields["num_attention_heads"]}
    return FIXED | fields | heads | shared | {"quantization_config": quantization_config(GROUP_SIZE)}


def write_target(directory: Path, changes: Mapping[str, Any], seed: int) -> int:
    """Write the INT4 model to the new directory; returns the number of parameters."""
    published = published_config(changes)
    config = target_config(published)
    directory.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    num_parameters = 0
    with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        for index, tensors in enumerate(
            progress.track(files(config, seed), config.num_hidden_layers + 1, description="files")
        ):
            name = f"model-{index:05d}.safetensors"
            save_file(tensors, directory / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
            num_parameters += sum(_parameters(name, tensor) for name, tensor in tensors.items())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(published, indent=1))
    for name in TOKENIZER_FILES:
        shutil.copyfile(embedded("target") / name, directory / name)
    return num_parameters


def _parameters(name: str, tensor: Tensor) -> int:
    if name.endswith(("weight_scale", "weight_shape")):
        return 0
    return tensor.numel() * (WORD if name.endswith("weight_packed") else 1)


def drafter_shape(target: TargetConfig) -> DrafterConfig:
    """One layer of the target's width over an early, a middle and a late boundary; a quarter of the vocabulary."""
    layers = target.num_hidden_layers
    return DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=target.hidden_size // 8,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size // 4,
        boundaries=tuple(sorted({min(2, layers), layers // 2, layers})),
        max_position_embeddings=target.max_position_embeddings,
    )


def write_drafter(directory: Path, target_directory: Path, seed: int) -> None:
    """Write a random drafter for the target; every fourth id is in its vocabulary."""
    target = load_target(target_directory)
    config = drafter_shape(target.config)
    ids = torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size)
    save_drafter(new_drafter(config, target, ids, seed), directory)


def parser() -> argparse.ArgumentParser:
    options = new_parser("synthetic", __doc__ or "")
    options.add_argument("directory", type=Path, metavar="DIR", help="where to write; must not exist or be empty")
    options.add_argument("--bf16", action="store_true", help="write the dequantised twin too (four times the size)")
    options.add_argument("--seed", type=int, default=0, help="of all weights (default: 0)")
    options.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of config.json, e.g. q_lora_rank=768",
    )
    return options


def changes_of(settings: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE, the value as JSON."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            raise ModelError(f"--set {setting}: write FIELD=VALUE with a JSON value, such as q_lora_rank=768") from None
    return changes


def write(directory: Path, changes: Mapping[str, Any], seed: int, *, bf16: bool, report: Report) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise ModelError(f"{directory} is not empty: pass a new directory")
    num_parameters = write_target(directory / "target", changes, seed)
    write_drafter(directory / "drafter", directory / "target", seed)
    if bf16:
        write_twin(directory / "target", directory / "target-bf16")
    rows = []
    for part in sorted(path for path in directory.iterdir()):
        sizes = [path.stat().st_size for path in part.glob("*.safetensors")]
        rows.append([str(part), str(len(sizes)), f"{sum(sizes) / 1e6:.0f} MB"])
    report.table(f"{num_parameters / 1e9:.2f} B parameters, seed {seed}", ("directory", "files", "weights"), rows)
    report.notes(["the weights are random: texts and acceptance on this model mean nothing, times do"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(arguments)
    try:
        report = Report.begin("synthetic", arguments)
        write(options.directory, changes_of(options.set), options.seed, bf16=options.bf16, report=report)
    except ValueError as error:  # the user's to mend
        print(f"bench/synthetic.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
