"""What hypothesis draws for the models: tiny configs, ways to cut a prompt, trees, and cache slots in any order."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import minieagle
from minieagle.models.attention import KEY_BLOCK
from minieagle.models.cache import PagedCache, PagePool
from minieagle.models.deepseek import Block, Target, TargetOutput
from minieagle.models.moe import Expert, MixtureOfExperts
from minieagle.models.rows import Rows, Span
from minieagle.models.target_weights import load_target
from tests.oracles import save_target

SEEDS = st.integers(0, 2**20)
MSCALES = st.sampled_from([None, 0.0, 0.7, 1.0])


@st.composite
def yarns(draw: st.DrawFn) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "factor": draw(st.sampled_from([1.0, 4.0, 40.0])),
        "original_max_position_embeddings": draw(st.sampled_from([16, 64, 4096])),
        "beta_fast": draw(st.sampled_from([1, 32])),
        "beta_slow": 1,
        "mscale": draw(MSCALES),
        "mscale_all_dim": draw(MSCALES),
    }
    return {draw(st.sampled_from(["type", "rope_type"])): "yarn"} | {k: v for k, v in scaling.items() if v is not None}


@st.composite
def experts(draw: st.DrawFn) -> dict[str, Any]:
    groups, each = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    return {
        "n_routed_experts": groups * each,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": draw(st.integers(1, kept * each)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
    }


@st.composite
def target_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Changes to oracles.TINY that transformers accepts: every branch of the architecture, unequal widths. Not so small
    that torch leaves its matrix products for plain loops (rows x inner x columns below 400), which round otherwise."""
    layers = draw(st.integers(1, 3))
    heads = draw(st.sampled_from([1, 2, 3, 8]))
    sizes = {
        "vocab_size": draw(st.sampled_from([33, 96])),
        "hidden_size": draw(st.sampled_from([24, 32, 64])),
        "moe_intermediate_size": draw(st.sampled_from([8, 16, 24])),
        "q_lora_rank": draw(st.sampled_from([None, 8, 24])),
        "kv_lora_rank": draw(st.sampled_from([16, 24, 32])),
        "qk_nope_head_dim": draw(st.sampled_from([8, 16, 24])),
        "qk_rope_head_dim": draw(st.sampled_from([2, 8, 16])),
        "v_head_dim": draw(st.sampled_from([8, 12, 16, 32])),  # GLM-4.7-Flash: wider than nope
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_theta": draw(st.sampled_from([100.0, 10000.0, 50000.0])),
        "rope_scaling": draw(st.none() | yarns()),
    }
    return sizes | draw(experts())


@st.composite
def splits(draw: st.DrawFn, total: int, most: int = 8) -> list[int]:
    """Chunk sizes that sum to total: one chunk, single rows, or anything between."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=most - 1))) if total > 1 else []
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def near_blocks(draw: st.DrawFn, most_blocks: int = 2) -> int:
    """A length at or around a multiple of KEY_BLOCK, where the attention's sums change shape."""
    return max(1, draw(st.integers(0, most_blocks)) * KEY_BLOCK + draw(st.integers(-3, 3)))


def parents(most: int = 10) -> st.SearchStrategy[list[int]]:
    """A tree as each node's parent, the root first."""
    return st.lists(st.integers(0, 2**16), max_size=most - 1).map(
        lambda draws: [-1, *[d % (i + 1) for i, d in enumerate(draws)]]
    )


def path(tree: list[int], node: int) -> list[int]:
    """The nodes from the root to node."""
    return [] if node < 0 else [*path(tree, tree[node]), node]


def leaves(tree: list[int]) -> list[int]:
    return [node for node in range(len(tree)) if node not in tree]


def ancestors(tree: list[int]) -> Tensor:
    """[nodes, depth] int64: each node's path, padded with -1."""
    paths = [path(tree, node) for node in range(len(tree))]
    deepest = max(map(len, paths))
    return torch.tensor([nodes + [-1] * (deepest - len(nodes)) for nodes in paths])


def shuffled_slots(num_rows: int, page_size: int, seed: int) -> Tensor:
    """Slots of a sequence of num_rows whose pages lie anywhere among twice as many."""
    pool = PagePool(2 * -(-num_rows // page_size), page_size)
    pages = pool.allocate(pool.num_pages)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))[: pool.pages_for(num_rows)]
    return pool.slots(tuple(pages[i] for i in order), torch.device("cpu"))


def an_expert(target: Target) -> Expert:
    """The first routed expert of the last layer."""
    block = target.layers[-1]
    assert isinstance(block, Block) and isinstance(block.feed_forward, MixtureOfExperts)
    expert = block.feed_forward.experts[0]
    assert isinstance(expert, Expert)
    return expert


def tokens(num: int, seed: int, vocab: int = 33) -> Tensor:
    return torch.randint(0, vocab, (num,), generator=torch.Generator().manual_seed(seed))


class Run:
    """One sequence of a target and its cache, fed span by span."""

    def __init__(self, target: Target, num_rows: int, *, page_size: int = 16, seed: int = 0) -> None:
        self.target = target
        self.slots = shuffled_slots(num_rows, page_size, seed)
        self.cache: PagedCache = target.new_cache(int(self.slots.max()) + 1)
        self.committed = 0

    def forward(
        self, token_ids: Tensor, tree: list[int] | None = None, boundaries: tuple[int, ...] = ()
    ) -> TargetOutput:
        """A chunk, which is committed, or a tree, which is not."""
        table = None if tree is None else ancestors(tree)
        span = Span(self.slots, self.committed, token_ids.shape[0], table)
        if tree is None:
            self.committed += token_ids.shape[0]
        return self.target(Rows.of(token_ids, [span]), self.cache, boundaries=boundaries)

    def chunks(self, token_ids: Tensor, sizes: list[int], boundaries: tuple[int, ...] = ()) -> TargetOutput:
        """The outputs of all chunks, joined."""
        outs = [self.forward(part, boundaries=boundaries) for part in token_ids.split(sizes)]
        return TargetOutput(torch.cat([o.logits for o in outs]), torch.cat([o.captured for o in outs]))


@cache
def tiny_target() -> Target:
    """The TINY model in float32."""
    with tempfile.TemporaryDirectory() as directory:
        return load_target(save_target(Path(directory)))


@cache
def embedded_target() -> Target:
    """The model that ships inside the package: bf16, INT4 experts."""
    return load_target(Path(minieagle.__file__).parent / "assets" / "target")
