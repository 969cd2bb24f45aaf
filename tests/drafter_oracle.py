"""What drafters are compared against: the published formulas restated in float64, one plain product at a time.

Written apart from the engine: no cache, batch or fused weight, latent attention with every key and value built, angles
from Python's math. Checkpoints come from a minimal writer under the official names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minieagle.models.deepseek import Target

Tensors = dict[str, Tensor]
Config = dict[str, Any]

BASE: Config = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "draft_vocab_size": 40,
    "boundaries": [3, 0, 2],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "rope_theta": 10000.0,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_head": True,
    "qk_norm": False,
    "num_hidden_layers": 1,
    "rope_style": "half",
    "yarn": None,
    "latent": None,
    "last_state": "pre-norm",
    "own_embeddings": False,
    "own_head": True,
    "dtype": "float32",
}
"""A drafter of the TINY target, plain in everything."""

LATENT: Config = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
YARN: Config = {
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}

WIRINGS: dict[str, Config] = {
    "plain": {},
    "one tap, whole vocabulary": {"num_key_value_heads": 4, "boundaries": [1], "draft_vocab_size": 96},
    "four taps, one key head": {"num_key_value_heads": 1, "head_dim": 24, "boundaries": [0, 1, 2, 3]},
    "another width": {"hidden_size": 48, "own_embeddings": True},
    "interleaved": {"rope_style": "interleaved"},
    "head norms": {"qk_norm": True},
    "yarn": {"yarn": YARN},
    "yarn without mscale": {"yarn": YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}},
    "head un-normed": {"norm_before_head": False},
    "target's head": {"own_head": False, "draft_vocab_size": 96},
    "last state normed": {"last_state": "post-norm"},
    "three layers": {"num_hidden_layers": 3},
    "latent": {"latent": LATENT, "rope_style": "interleaved"},
    "latent, plain queries": {"latent": LATENT | {"q_lora_rank": None}, "rope_style": "interleaved"},
    "latent, halves, yarn": {"latent": LATENT, "rope_style": "half", "yarn": YARN},
    "latent, two layers, yarn": {"latent": LATENT, "rope_style": "interleaved", "yarn": YARN, "num_hidden_layers": 2},
}
"""What BASE is changed by: every kind of drafter that is read."""


# ---- a checkpoint


def _attention_shapes(config: Config, width: int) -> dict[str, tuple[int, ...]]:
    heads, latent = config["num_attention_heads"], config["latent"]
    if latent is None:
        kv = config["num_key_value_heads"] * config["head_dim"]
        shapes: dict[str, tuple[int, ...]] = {"k_proj": (kv, width), "v_proj": (kv, width)}
        shapes |= {"q_proj": (heads * config["head_dim"], width)}
        shapes |= {"o_proj": (config["hidden_size"], heads * config["head_dim"])}
        norms = {"q_norm": (config["head_dim"],), "k_norm": (config["head_dim"],)}
        return shapes | (norms if config["qk_norm"] else {})
    rank, nope, rope, value = (
        latent[n] for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    shapes = {"kv_a_proj_with_mqa": (rank + rope, width), "kv_a_layernorm": (rank,)}
    shapes |= {"kv_b_proj": (heads * (nope + value), rank), "o_proj": (config["hidden_size"], heads * value)}
    low = latent["q_lora_rank"]
    if low is None:
        return shapes | {"q_proj": (heads * (nope + rope), width)}
    return shapes | {"q_a_proj": (low, width), "q_a_layernorm": (low,), "q_b_proj": (heads * (nope + rope), low)}


def _layer_shapes(config: Config, prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes |= {f"self_attn.{name}": shape for name, shape in _attention_shapes(config, width).items()}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, taps, target_width = config["hidden_size"], len(config["boundaries"]), config["target_hidden_size"]
    shapes = {"fc.weight": (hidden, taps * target_width), "norm.weight": (hidden,)}
    shapes |= _layer_shapes(config, "midlayer", 2 * hidden) | {"midlayer.hidden_norm.weight": (hidden,)}
    for index in range(1, config["num_hidden_layers"]):
        shapes |= _layer_shapes(config, f"layers.{index}", hidden)
    if config["own_head"]:
        shapes["lm_head.weight"] = (config["draft_vocab_size"], hidden)
    if config["own_embeddings"]:
        shapes["embed_tokens.weight"] = (config["vocab_size"], hidden)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (target_width,) for i in range(taps)}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (taps * target_width,)
    return shapes


def drafter_tensors(config: Config, seed: int = 0) -> Tensors:
    """Random tensors of an EAGLE-3 checkpoint under the official names, norms away from 1, d2t as offsets."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: _random(shape, draw) for name, shape in _shapes(config).items()}
    kept = torch.randperm(config["vocab_size"], generator=draw)[: config["draft_vocab_size"]].sort().values
    tensors["d2t"] = kept - torch.arange(kept.shape[0])
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, kept, True)
    return tensors


def _random(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return 0.5 + torch.rand(shape, generator=draw)
    return torch.randn(shape, generator=draw) * 1.5 * shape[1] ** -0.5


def save_drafter_files(directory: Path, config: Config, tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


# ---- the formulas


@dataclass(frozen=True)
class Shared:
    """What a drafter may take from its target: embeddings [vocab, width], head [vocab, width], the final norm's weight
    [width] and epsilon, and the number of layers, which is the last boundary."""

    embeddings: Tensor
    head: Tensor
    norm: Tensor
    norm_eps: float
    num_layers: int

    @staticmethod
    def of(target: Target) -> Shared:
        config = target.config
        head, norm = target.lm_head.dense_weight(), target.norm.weight
        return Shared(target.embed_tokens, head, norm, config.rms_norm_eps, config.num_hidden_layers)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequency(pair: int, dim: int, theta: float, yarn: Config | None) -> float:
    """Radians per position of a pair: YaRN (arXiv 2309.00071) keeps the fast ones and slows the slow ones down."""
    plain = theta ** (-2 * pair / dim)
    if yarn is None:
        return plain

    def turns(count: float) -> float:
        return dim * math.log(yarn["original_max_position_embeddings"] / (count * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(turns(yarn["beta_fast"])), 0), min(math.ceil(turns(yarn["beta_slow"])), dim - 1)
    ramp = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
    return plain * (1 - ramp) + plain / yarn["factor"] * ramp


def _amplitude(yarn: Config | None) -> float:
    """What YaRN multiplies cos and sin with."""
    if yarn is None:
        return 1.0
    if yarn["mscale"] and yarn["mscale_all_dim"]:
        return _mscale(yarn["factor"], yarn["mscale"]) / _mscale(yarn["factor"], yarn["mscale_all_dim"])
    return _mscale(yarn["factor"], 1.0)


class PlainDrafter:
    """The published drafter with a growing list of rows.

    Row t: e = input_layernorm(embed(token)), g = hidden_norm(h), x = [e ; g]; r = (h or g) + attention(x);
    y = r + mlp(post_attention_layernorm(r)), then plain layers; logits = lm_head(norm(y)); the next step's h is y, or
    norm(y).
    """

    def __init__(self, config: Config, tensors: Tensors, shared: Shared) -> None:
        self.config, self.shared = config, shared
        self.weights = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
        if not config["own_embeddings"]:
            self.weights["embed_tokens.weight"] = shared.embeddings.double()
        if not config["own_head"]:
            self.weights["lm_head.weight"] = shared.head.double()
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config["num_hidden_layers"])]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return _normed(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _times(self, x: Tensor, name: str) -> Tensor:
        return self.weights[f"{name}.weight"] @ x

    def _rotated(self, heads: Tensor, position: int) -> Tensor:
        """heads [n, dim], each pair turned by its angle."""
        config, out, dim = self.config, heads.clone(), heads.shape[1]
        size = _amplitude(config["yarn"])
        for i in range(dim // 2):
            a, b = (i, i + dim // 2) if config["rope_style"] == "half" else (2 * i, 2 * i + 1)
            angle = position * frequency(i, dim, config["rope_theta"], config["yarn"])
            out[:, a] = size * (heads[:, a] * math.cos(angle) - heads[:, b] * math.sin(angle))
            out[:, b] = size * (heads[:, a] * math.sin(angle) + heads[:, b] * math.cos(angle))
        return out

    def _grouped(self, x: Tensor, prefix: str, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [H, P], and the row's key and value for each query head [H, P]."""
        q, k, v = (self._times(x, f"{prefix}.{n}_proj").view(-1, self.config["head_dim"]) for n in "qkv")
        if self.config["qk_norm"]:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        repeats = q.shape[0] // k.shape[0]
        q, k = self._rotated(q, position), self._rotated(k, position)
        return q, k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)

    def _latent(self, x: Tensor, prefix: str, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same of latent attention, every head's key and value built: [H, N + P], [H, N + P], [H, V]."""
        sizes, heads = self.config["latent"], self.config["num_attention_heads"]
        nope, rank = sizes["qk_nope_head_dim"], sizes["kv_lora_rank"]
        if sizes["q_lora_rank"] is None:
            q = self._times(x, f"{prefix}.q_proj")
        else:
            low = self._norm(self._times(x, f"{prefix}.q_a_proj"), f"{prefix}.q_a_layernorm")
            q = self._times(low, f"{prefix}.q_b_proj")
        q = q.view(heads, -1)
        both = self._times(x, f"{prefix}.kv_a_proj_with_mqa")
        kv = self._times(self._norm(both[:rank], f"{prefix}.kv_a_layernorm"), f"{prefix}.kv_b_proj").view(heads, -1)
        shared = self._rotated(both[None, rank:], position).expand(heads, -1)
        key = torch.cat((kv[:, :nope], shared), dim=1)
        return torch.cat((q[:, :nope], self._rotated(q[:, nope:], position)), dim=1), key, kv[:, nope:]

    def _scale(self, width: int) -> float:
        yarn = self.config["yarn"]
        if self.config["latent"] is None or yarn is None or not yarn["mscale_all_dim"]:
            return 1 / math.sqrt(width)
        return _mscale(yarn["factor"], yarn["mscale_all_dim"]) ** 2 / math.sqrt(width)

    def _attention(self, x: Tensor, index: int, position: int) -> Tensor:
        prefix = f"{f'layers.{index}' if index else 'midlayer'}.self_attn"
        q, k, v = (self._latent if self.config["latent"] else self._grouped)(x, prefix, position)
        self.rows[index].append((k, v))
        heads = []
        for h in range(q.shape[0]):
            keys, values = (torch.stack([row[part][h] for row in self.rows[index]]) for part in (0, 1))
            heads.append((keys @ q[h] * self._scale(q.shape[1])).softmax(0) @ values)
        return self._times(torch.cat(heads), f"{prefix}.o_proj")

    def _mlp(self, r: Tensor, prefix: str) -> Tensor:
        x = self._norm(r, f"{prefix}.post_attention_layernorm")
        gate, up = self._times(x, f"{prefix}.mlp.gate_proj"), self._times(x, f"{prefix}.mlp.up_proj")
        return r + self._times(gate * gate.sigmoid() * up, f"{prefix}.mlp.down_proj")

    def fuse(self, captured: Tensor) -> Tensor:
        """One row's boundaries [taps, target width] -> its state [hidden]."""
        config, shared, chunks = self.config, self.shared, list(captured.double())
        if config["last_state"] == "post-norm":
            last = config["boundaries"].index(shared.num_layers)
            chunks[last] = _normed(chunks[last], shared.norm, shared.norm_eps)
        if config["fc_norm"]:
            chunks = [self._norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)]
        wide = torch.cat(chunks)
        return self._times(self._norm(wide, "input_norm") if config["norm_before_fc"] else wide, "fc")

    def step(self, token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """One row: its logits [draft vocab] and the state that it hands to the next draft step."""
        e = self._norm(self.weights["embed_tokens.weight"][token], "midlayer.input_layernorm")
        g = self._norm(state, "midlayer.hidden_norm")
        residual = g if self.config["norm_before_residual"] else state
        y = self._mlp(residual + self._attention(torch.cat((e, g)), 0, position), "midlayer")
        for index in range(1, self.config["num_hidden_layers"]):
            read = self._norm(y, f"layers.{index}.input_layernorm")
            y = self._mlp(y + self._attention(read, index, position), f"layers.{index}")
        normed = self._norm(y, "norm")
        logits = self._times(normed if self.config["norm_before_head"] else y, "lm_head")
        return logits, normed if self.config["norm_output"] else y

    def run(self, tokens: Iterable[int], captured: Tensor) -> Tensor:
        """Logits [len(tokens), draft vocab]: rows that the target has run take its captured boundaries, later ones (the
        draft steps) the state of the row before."""
        logits, state = list[Tensor](), captured.new_zeros(0)
        for position, token in enumerate(tokens):
            known = position < len(captured)
            row, state = self.step(token, self.fuse(captured[position]) if known else state, position)
            logits.append(row)
        return torch.stack(logits)
