"""What the models are compared against, written apart from the engine's own code.

The target's oracle is transformers' DeepSeek-V3: tiny random models saved by its own `save_pretrained`, hence under the
published names. Norms and router biases are drawn anew, since they start at 1 and 0 and would hide a missing one. The
INT4 oracle unpacks nibbles with Python integers. The drafter's oracle is in drafter_oracle.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

Tensors = dict[str, Tensor]

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-3,  # far from the 1e-6 of the two low-rank norms, so that a mix-up shows
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "rope_theta": 10000.0,
}
"""A small model that has every feature: expert groups, YaRN with unequal mscale terms, unequal widths."""


def _randomise(model: DeepseekV3ForCausalLM) -> None:
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):
            tensor.uniform_(0.5, 1.5)
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.3)


def save_target(directory: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random DeepSeek-V3 of the TINY shape with `changes`, as transformers saves it; returns the directory."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**copy.deepcopy(TINY | changes)))
        _randomise(model)
    # Not `.to(dtype)`: that would round the router's bias and the rotary frequencies too.
    keep = {name for name, _ in model.named_buffers()}
    tensors = {n: t.to(dtype) if n not in keep else t for n, t in model.state_dict().items()}
    model.save_pretrained(directory, state_dict=tensors)
    config = json.loads((directory / "config.json").read_text())  # says float32, the dtype of the model in memory
    (directory / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return directory


@dataclass(frozen=True)
class Reference:
    """transformers' logits [T, vocab] and hidden_states, L + 1 of [T, hidden], the last one after the final norm."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...]


class Oracle:
    """transformers' own model of a directory, in float32."""

    def __init__(self, directory: Path) -> None:
        self.model = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def run(self, token_ids: Sequence[int]) -> Reference:
        out = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
        return Reference(out.logits[0], tuple(state[0] for state in out.hidden_states))

    @torch.no_grad()
    def is_decided(self, token_ids: Sequence[int]) -> bool:
        """Whether routing is beyond rounding: the bias takes part in the choice of experts only, so moving it by 1e-5
        changes nothing unless two experts (nearly) tie."""
        before = self.run(token_ids).logits
        biases = [b for name, b in self.model.named_buffers() if name.endswith("e_score_correction_bias")]
        kept = [bias.clone() for bias in biases]
        same = True
        for seed in range(2):
            for bias, value in zip(biases, kept, strict=True):
                noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed))
                bias.copy_(value + 2e-5 * (noise - 0.5))
            same = same and torch.equal(self.run(token_ids).logits, before)
        for bias, value in zip(biases, kept, strict=True):
            bias.copy_(value)
        return same


# ---- INT4


def nibbles(word: int) -> list[int]:
    """The eight codes of one packed word, lowest bits first, by Python integers."""
    return [((word & 0xFFFFFFFF) >> (4 * k)) % 16 - 8 for k in range(8)]


def dequantised(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 weight [out, in] of packed words [out, in / 8] and scales [out, groups]: code times scale, unrounded."""
    rows = [[code for word in row for code in nibbles(word)] for row in packed.tolist()]
    codes = torch.tensor(rows, dtype=torch.float32)
    return codes * scale.float().repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)


def save_dequantised(source: Path, target: Path) -> Path:
    """A plain float32 copy of an INT4 directory, every expert weight an exact code times scale."""
    tensors = load_file(source / "model.safetensors")
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            plain[stem] = dequantised(tensor, tensors[f"{stem}_scale"])
        elif not name.endswith((".weight_scale", ".weight_shape")):
            plain[name] = tensor.float()
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    return target
