"""What `minieagle inspect` takes on headers as large as Kimi-K2.5's, and how near its figures come to the known ones.

    python bench/survey.py
    python bench/survey.py --keep DIR

Writes config.json, an index and 64 weight files with the names, types and shapes of all 208,550 tensors but without
their 595 GB: the data is a hole in the file. The known figures were computed from the shapes apart from this code, and
their sum agrees with what the published files take.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file, without an install

from bench.report import Report, new_parser

NUM_FILES = 64
NUM_LAYERS, NUM_EXPERTS, HIDDEN, INNER, DENSE, VOCAB = 61, 384, 7168, 2048, 18432, 163840
ITEM_BYTES = {"BF16": 2, "F32": 4, "I32": 4}

Entry = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""

CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "eos_token_id": 163585,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
                }
            },
        },
    },
}


def _swiglu(prefix: str, inner: int) -> Iterator[Entry]:
    for name, shape in (("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner))):
        yield f"{prefix}.{name}_proj.weight", "BF16", shape


def _experts(prefix: str) -> Iterator[Entry]:
    for expert in range(NUM_EXPERTS):
        for name, (out, width) in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            weight = f"{prefix}.{expert}.{name}_proj.weight"
            yield f"{weight}_packed", "I32", (out, width // 8)
            yield f"{weight}_scale", "BF16", (out, width // 32)
            yield f"{weight}_shape", "I32", (2,)


def _layer(index: int) -> Iterator[Entry]:
    prefix = f"language_model.model.layers.{index}"
    attention = {
        "q_a_proj": (1536, HIDDEN),
        "q_a_layernorm": (1536,),
        "q_b_proj": (12288, 1536),
        "kv_a_proj_with_mqa": (576, HIDDEN),
        "kv_a_layernorm": (512,),
        "kv_b_proj": (16384, 512),
        "o_proj": (HIDDEN, 8192),
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", "BF16", (HIDDEN,)
    for name, shape in attention.items():
        yield f"{prefix}.self_attn.{name}.weight", "BF16", shape
    if index == 0:
        yield from _swiglu(f"{prefix}.mlp", DENSE)
        return
    yield f"{prefix}.mlp.gate.weight", "BF16", (NUM_EXPERTS, HIDDEN)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (NUM_EXPERTS,)
    yield from _swiglu(f"{prefix}.mlp.shared_experts", INNER)
    yield from _experts(f"{prefix}.mlp.experts")


def _vision() -> Iterator[Entry]:
    """335 tensors of 0.47 B parameters in all; which exactly doesn't matter to a text-only engine."""
    yield "mm_projector.proj.2.weight", "BF16", (HIDDEN, 4608)
    yield "mm_projector.proj.0.weight", "BF16", (4608, 4608)
    for index in range(333):
        yield f"vision_tower.encoder.blocks.{index}.weight", "BF16", (1152, 1080)


def entries() -> Iterator[Entry]:
    """Every tensor of the published model."""
    yield "language_model.model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    for index in range(NUM_LAYERS):
        yield from _layer(index)
    yield "language_model.model.norm.weight", "BF16", (HIDDEN,)
    yield "language_model.lm_head.weight", "BF16", (VOCAB, HIDDEN)
    yield from _vision()


def _write_file(path: Path, members: Sequence[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in members:
        start, size = end, ITEM_BYTES[dtype]
        for number in shape:
            size *= number
        end = start + size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + end)


def write_headers(directory: Path) -> int:
    """Write the directory; returns the number of tensors."""
    everything = list(entries())
    per_file = -(-len(everything) // NUM_FILES)
    weight_map: dict[str, str] = {}
    for index in range(NUM_FILES):
        name = f"model-{index + 1:05d}-of-{NUM_FILES:06d}.safetensors"
        members = everything[index * per_file : (index + 1) * per_file]
        _write_file(directory / name, members)
        weight_map |= {tensor: name for tensor, _, _ in members}
    index_text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index_text)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return len(everything)


def figures(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, known, found) of the output of `minieagle inspect --json`."""
    parts = {part["name"]: part for part in found["parts"]}
    plan = next(plan for plan in found["plans"] if plan["tp"] == 8)
    return [
        ("parameters, B", 1026, found["num_parameters"] / 1e9),
        ("active per token, B", 31.7, found["num_active_parameters"] / 1e9),
        ("weights, GB", 594.2, found["nbytes"] / 1e9),
        ("routed experts, GiB", 531.6, parts["routed experts"]["nbytes"] / 2**30),
        ("read per token, GB", 33.0, found["read_bytes_per_token"] / 1e9),
        ("of it routed experts, GB", 11.9, parts["routed experts"]["read_bytes"] / 1e9),
        ("of it attention, GB", 12.3, parts["attention"]["read_bytes"] / 1e9),
        ("cache per token, bytes", 70272, found["kv_bytes_per_token"]),
        ("weights per rank at TP 8, GB", 76.2, plan["rank_bytes"] / 1e9),
        ("read per token and rank, GB", 6.03, plan["rank_read_bytes"] / 1e9),
        ("all-reduces", 123, plan["collectives"]["num_all_reduces"]),
        ("gathers", 1, plan["collectives"]["num_gathers"]),
    ]


def inspected(directory: Path) -> tuple[dict[str, Any], float, float]:
    """Output, elapsed seconds and CPU seconds (user) of the command, start of the interpreter and imports included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
    command = [sys.executable, "-m", "minieagle.cli", "inspect", str(directory), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[1])
    elapsed = time.perf_counter() - start
    return json.loads(done.stdout), elapsed, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def measure(directory: Path, report: Report) -> None:
    count = write_headers(directory)
    found, elapsed_s, cpu_s = inspected(directory)
    rows = [
        [what, f"{known:g}", f"{value:.6g}", f"{100 * (value / known - 1):+.2f} %"]
        for what, known, value in figures(found)
    ]
    report.table(f"{count} tensors in {NUM_FILES} files", ("figure", "known", "inspect", "difference"), rows)
    report.say(f"\ninspect took {elapsed_s:.2f} s, {cpu_s:.2f} s of CPU in user mode, imports included")
    report.notes(["read per token: one token in the batch; every weight that it uses once"])


def parser() -> argparse.ArgumentParser:
    options = new_parser("survey", __doc__ or "")
    options.add_argument("--keep", type=Path, metavar="DIR", help="write the headers to this new directory and keep it")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(arguments)
    report = Report.begin("survey", arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        measure(options.keep, report)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
