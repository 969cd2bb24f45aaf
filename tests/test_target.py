"""The target against transformers' DeepSeek-V3, and against itself: a row's bits are its own in any batch."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.models.attention import KEY_BLOCK
from minieagle.models.deepseek import Target
from minieagle.models.rows import Rows, Span
from minieagle.models.target_weights import load_target
from tests.oracles import Oracle, Reference, save_target
from tests.strategies import (
    SEEDS,
    Run,
    ancestors,
    embedded_target,
    leaves,
    near_blocks,
    parents,
    path,
    shuffled_slots,
    splits,
    target_configs,
    tiny_target,
    tokens,
)

CLOSE = 2e-4
NUM_TOKENS = 20
TARGETS = pytest.mark.parametrize("load", [tiny_target, embedded_target])
Load = Callable[[], Target]


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=CLOSE, rtol=0)


# ---- against transformers


@dataclass(frozen=True)
class Pair:
    """A random model in both implementations."""

    oracle: Oracle
    target: Target

    @property
    def all_boundaries(self) -> tuple[int, ...]:
        return tuple(range(self.target.config.num_hidden_layers + 1))


def load_pair(seed: int, changes: dict[str, Any]) -> Pair:
    with tempfile.TemporaryDirectory() as directory:
        save_target(Path(directory), seed, **changes)
        return Pair(Oracle(Path(directory)), load_target(Path(directory)))


def reference(pair: Pair, token_ids: Tensor) -> Reference:
    """transformers' result, for models whose routing is no coin toss on these tokens."""
    assume(pair.oracle.is_decided(token_ids.tolist()))
    return pair.oracle.run(token_ids.tolist())


@settings(max_examples=60)
@given(target_configs(), SEEDS, splits(NUM_TOKENS))
def test_logits_and_boundaries_equal_transformers(changes: dict[str, Any], seed: int, sizes: list[int]) -> None:
    pair, token_ids = load_pair(seed, changes), tokens(NUM_TOKENS, seed)
    wanted = reference(pair, token_ids)
    got = Run(pair.target, NUM_TOKENS, seed=seed).chunks(token_ids, sizes, pair.all_boundaries)
    assert_close(got.logits, wanted.logits)
    for b in pair.all_boundaries[:-1]:
        assert_close(got.captured[:, b], wanted.hidden_states[b])
    assert_close(pair.target.norm(got.captured[:, -1]), wanted.hidden_states[-1])


@settings(max_examples=30)
@given(target_configs(), SEEDS, parents(), st.integers(0, 12))
def test_tree_rows_equal_transformers_on_their_paths(
    changes: dict[str, Any], seed: int, tree: list[int], committed: int
) -> None:
    pair, token_ids = load_pair(seed, changes), tokens(committed + len(tree), seed)
    run = Run(pair.target, committed + len(tree), seed=seed)
    if committed:
        run.forward(token_ids[:committed])
    got = run.forward(token_ids[committed:], tree, pair.all_boundaries)
    for leaf in leaves(tree):
        nodes = torch.tensor(path(tree, leaf))
        wanted = reference(pair, torch.cat((token_ids[:committed], token_ids[committed + nodes])))
        assert_close(got.logits[nodes], wanted.logits[committed:])
        assert_close(got.captured[nodes, 0], wanted.hidden_states[0][committed:])


@pytest.mark.parametrize("wrong", [{"lora_norm_eps": 1e-3}, {"rms_norm_eps": 1e-6}])
def test_each_norm_has_its_own_epsilon(wrong: dict[str, float], tmp_path: Path) -> None:
    save_target(tmp_path)
    token_ids = tokens(NUM_TOKENS, 0)
    wanted = Oracle(tmp_path).run(token_ids.tolist()).logits
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    got = Run(load_target(tmp_path), NUM_TOKENS).forward(token_ids).logits
    assert (got - wanted).abs().max() > CLOSE


def test_shifted_boundaries_do_not_pass() -> None:
    """The negative control: "output of layer b" in place of "input of layer b" is far off, at every depth."""
    pair = load_pair(0, {})
    token_ids = tokens(NUM_TOKENS, 0)
    captured = Run(pair.target, NUM_TOKENS).forward(token_ids, boundaries=pair.all_boundaries).captured
    for b, state in enumerate(pair.oracle.run(token_ids.tolist()).hidden_states[:-1]):
        assert (captured[:, b + 1] - state).abs().max() > 100 * CLOSE


# ---- boundaries


@given(st.lists(st.integers(0, 3), max_size=4, unique=True), SEEDS)
def test_boundaries_come_in_the_order_asked_for(boundaries: list[int], seed: int) -> None:
    token_ids = tokens(5, seed)
    every = Run(tiny_target(), 8).forward(token_ids, boundaries=(0, 1, 2, 3))
    some = Run(tiny_target(), 8).forward(token_ids, boundaries=tuple(boundaries))
    assert torch.equal(some.captured, every.captured[:, boundaries])
    assert torch.equal(some.logits, every.logits)


@TARGETS
@torch.inference_mode()
def test_the_head_of_the_last_boundary_is_the_logits(load: Load) -> None:
    target, last = load(), load().config.num_hidden_layers
    out = Run(target, 8).forward(tokens(5, 0), boundaries=(last,))
    assert torch.equal(target.head(out.captured[:, 0]), out.logits)


@given(st.lists(st.integers(0, 19), min_size=1, max_size=6))
def test_logits_only_at_the_wanted_rows(wanted: list[int]) -> None:
    slots, token_ids = shuffled_slots(NUM_TOKENS, 4, 0), tokens(NUM_TOKENS, 0)
    rows = Rows.of(token_ids, [Span(slots, 0, NUM_TOKENS)])
    cache = tiny_target().new_cache(64)
    some = tiny_target()(rows, cache, logit_rows=torch.tensor(wanted)).logits
    assert torch.equal(some, tiny_target()(rows, cache).logits[wanted])


# ---- the same bits in any company


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=15)
@given(target_configs(), near_blocks(1), parents(8), SEEDS, st.data())
def test_no_shape_of_model_depends_on_company(
    dtype: torch.dtype, changes: dict[str, Any], committed: int, tree: list[int], seed: int, data: st.DataObject
) -> None:
    """Chunks and trees against one forward over the same text, for any heads, experts and widths."""
    with tempfile.TemporaryDirectory() as directory:
        target = load_target(save_target(Path(directory), seed, dtype=dtype, **changes))
    token_ids, run = tokens(committed + len(tree), seed), Run(target, committed + len(tree), seed=seed)
    run.chunks(token_ids[:committed], data.draw(splits(committed)))
    got = run.forward(token_ids[committed:], tree).logits
    for leaf in leaves(tree):
        nodes = torch.tensor(path(tree, leaf))
        alone = torch.cat((token_ids[:committed], token_ids[committed + nodes]))
        assert torch.equal(got[nodes], Run(target, len(alone)).forward(alone).logits[committed:])


@TARGETS
@settings(max_examples=10)
@given(st.data(), near_blocks(), SEEDS)
def test_chunks_and_pages_change_no_bit(load: Load, data: st.DataObject, length: int, seed: int) -> None:
    token_ids, last = tokens(length, seed, load().config.vocab_size), load().config.num_hidden_layers
    whole = Run(load(), length, page_size=length, seed=0).forward(token_ids, boundaries=(0, last))
    page_size = data.draw(st.sampled_from([1, 7, 16, 64]))
    parts = Run(load(), length, page_size=page_size, seed=seed).chunks(token_ids, data.draw(splits(length)), (0, last))
    assert torch.equal(parts.logits, whole.logits)
    assert torch.equal(parts.captured, whole.captured)


@TARGETS
@settings(max_examples=10)
@given(near_blocks(), parents(12), SEEDS)
def test_tree_rows_have_the_bits_of_their_chain(load: Load, committed: int, tree: list[int], seed: int) -> None:
    config = load().config
    token_ids, last = tokens(committed + len(tree), seed, config.vocab_size), config.num_hidden_layers
    run = Run(load(), committed + len(tree), seed=seed)
    run.forward(token_ids[:committed])
    got = run.forward(token_ids[committed:], tree, (last,))
    for leaf in leaves(tree):
        nodes = torch.tensor(path(tree, leaf))
        alone = torch.cat((token_ids[:committed], token_ids[committed + nodes]))
        wanted = Run(load(), len(alone)).forward(alone, boundaries=(last,))
        assert torch.equal(got.logits[nodes], wanted.logits[committed:])
        assert torch.equal(got.captured[nodes], wanted.captured[committed:])


def spans_of(sequences: list[tuple[int, list[int] | None]], slots: list[Tensor], num: list[int]) -> list[Span]:
    """Each sequence's next span: committed rows, and a tree or a chunk of num rows."""
    tables = [None if tree is None else ancestors(tree) for _, tree in sequences]
    return [Span(s, c, n, t) for s, (c, _), n, t in zip(slots, sequences, num, tables, strict=True)]


SEQUENCES = st.lists(st.tuples(near_blocks(1), st.none() | parents(5)), min_size=2, max_size=6)


@TARGETS
@settings(max_examples=10)
@given(SEQUENCES, SEEDS)
def test_a_batch_changes_no_bit(load: Load, sequences: list[tuple[int, list[int] | None]], seed: int) -> None:
    """Chunks, steps and trees of several sequences in one forward, against each of them alone."""
    num = [4 if tree is None else len(tree) for _, tree in sequences]
    total = sum(committed for committed, _ in sequences) + sum(num)
    pool = shuffled_slots(total, 1, seed).split([c + n for (c, _), n in zip(sequences, num, strict=True)])
    vocab = load().config.vocab_size
    cache = load().new_cache(2 * total + 2)
    texts = [tokens(len(slots), seed + i, vocab) for i, slots in enumerate(pool)]
    for (committed, _), slots, text in zip(sequences, pool, texts, strict=True):
        load()(Rows.of(text[:committed], [Span(slots, 0, committed)]), cache)
    spans = spans_of(sequences, list(pool), num)
    news = [text[committed:] for (committed, _), text in zip(sequences, texts, strict=True)]
    together = load()(Rows.of(torch.cat(news), spans), cache).logits.split(num)
    for span, new, logits in zip(spans, news, together, strict=True):
        assert torch.equal(load()(Rows.of(new, [span]), cache).logits, logits)


@TARGETS
@settings(max_examples=8)
@given(near_blocks(), parents(10), SEEDS, st.data())
def test_kept_rows_continue_as_if_never_drafted(
    load: Load, committed: int, tree: list[int], seed: int, data: st.DataObject
) -> None:
    """prefill, tree, keep one path, decode on: the bits of plain decoding over the same text."""
    token_ids, accepted = (
        tokens(committed + len(tree) + 1, seed),
        path(tree, data.draw(st.sampled_from(range(len(tree))))),
    )
    run = Run(load(), committed + len(tree) + 1, seed=seed)
    run.forward(token_ids[:committed])
    run.forward(token_ids[committed:-1], tree)
    run.cache.keep(run.slots[committed + torch.tensor(accepted)], run.slots[committed : committed + len(accepted)])
    run.committed = committed + len(accepted)
    got = run.forward(token_ids[-1:])
    text = torch.cat((token_ids[:committed], token_ids[committed + torch.tensor(accepted)], token_ids[-1:]))
    assert torch.equal(got.logits[0], Run(load(), len(text)).forward(text).logits[-1])


def test_lengths_near_blocks_are_drawn_around_them() -> None:
    assert KEY_BLOCK == 64, "near_blocks and the lengths in these tests are sized for blocks of 64"
