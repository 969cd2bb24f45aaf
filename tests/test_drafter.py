"""The drafter against the published formulas restated in float64, for every combination of flags and three draft steps;
each wrong flag shows; its rows keep their bits; a wrong offset table does not load."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.models.checkpoint import CheckpointError
from minieagle.models.config import ConfigError
from minieagle.models.drafter_weights import load_drafter
from minieagle.models.eagle3 import Drafter, DrafterOutput
from minieagle.models.rows import Rows, Span
from minieagle.spec.train import save_drafter
from tests.oracles import PlainDrafter, Tensors, drafter_tensors, save_drafter_files
from tests.strategies import (
    SEEDS,
    ancestors,
    leaves,
    near_blocks,
    parents,
    path,
    shuffled_slots,
    splits,
    tiny_target,
    tokens,
)

CLOSE = 2e-4
NUM_TOKENS, NUM_STEPS = 9, 3
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
    "own_embeddings": False,
    "dtype": "float32",
}
FLAGS: list[Config] = [
    {"norm_before_residual": residual, "norm_output": output, "fc_norm": norm == "fc_norm"}
    | {"norm_before_fc": norm == "norm_before_fc", "own_embeddings": own}
    for residual, output, norm, own in product(
        [False, True], [False, True], ["none", "fc_norm", "norm_before_fc"], [False, True]
    )
]
SHAPES = st.sampled_from(
    [
        {},
        {"num_key_value_heads": 4, "boundaries": [1], "draft_vocab_size": 96},
        {"num_key_value_heads": 1, "head_dim": 24, "boundaries": [0, 1, 2, 3]},
        {"hidden_size": 48, "own_embeddings": True},
    ]
)


def load(config: Config, tensors: Tensors) -> Drafter:
    with tempfile.TemporaryDirectory() as directory:
        return load_drafter(save_drafter_files(Path(directory), config, tensors), tiny_target())


@cache
def base_drafter() -> Drafter:
    return load(BASE, drafter_tensors(BASE))


def random_states(config: Config, num: int, seed: int) -> Tensor:
    """Captured boundaries [num, taps, target width] of very unequal scale, as depth brings."""
    taps = len(config["boundaries"])
    drawn = torch.randn(num, taps, config["target_hidden_size"], generator=torch.Generator().manual_seed(seed))
    return drawn * torch.linspace(0.3, 4.0, taps)[None, :, None]


class Drafting:
    """One sequence's rows through the drafter and its cache."""

    def __init__(self, drafter: Drafter, num_rows: int, seed: int = 0) -> None:
        self.drafter, self.slots = drafter, shuffled_slots(num_rows, 4, seed)
        self.cache, self.committed = drafter.new_cache(int(self.slots.max()) + 1), 0

    def forward(self, token_ids: Tensor, states: Tensor, tree: list[int] | None = None) -> DrafterOutput:
        span = Span(self.slots, self.committed, len(token_ids), None if tree is None else ancestors(tree))
        self.committed += len(token_ids) if tree is None else 0
        return self.drafter(Rows.of(token_ids, [span]), states, self.cache)


def draft(drafter: Drafter, token_ids: Tensor, captured: Tensor, sizes: list[int]) -> Tensor:
    """Logits of the committed rows, fed in chunks, and of the NUM_STEPS draft steps behind them, on given tokens."""
    run, committed = Drafting(drafter, len(token_ids)), token_ids[:NUM_TOKENS]
    chunks = zip(committed.split(sizes), drafter.fuse(captured).split(sizes), strict=True)
    outs = [run.forward(part, states) for part, states in chunks]
    for token in token_ids[NUM_TOKENS:]:
        outs.append(run.forward(token[None], outs[-1].states[-1:]))
    return torch.cat([out.logits for out in outs])


def restated(config: Config, tensors: Tensors, token_ids: Tensor, captured: Tensor) -> Tensor:
    return PlainDrafter(config, tensors, tiny_target().embed_tokens).run(token_ids.tolist(), captured).float()


# ---- against the formulas


@dataclass(frozen=True)
class Case:
    """A drafter's files and what it is fed."""

    config: Config
    tensors: Tensors
    token_ids: Tensor
    captured: Tensor


def case(changes: Config, seed: int) -> Case:
    config, token_ids = BASE | changes, tokens(NUM_TOKENS + NUM_STEPS, seed, 96)
    return Case(config, drafter_tensors(config, seed), token_ids, random_states(config, NUM_TOKENS, seed))


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(name for name in flags if flags[name]) or "none")
@settings(max_examples=3)
@given(SHAPES, SEEDS, splits(NUM_TOKENS))
def test_logits_equal_the_formulas(flags: Config, shape: Config, seed: int, sizes: list[int]) -> None:
    c = case(flags | shape, seed)
    got = draft(load(c.config, c.tensors), c.token_ids, c.captured, sizes)
    torch.testing.assert_close(got, restated(c.config, c.tensors, c.token_ids, c.captured), atol=CLOSE, rtol=0)


def agrees(c: Case, wrong: Config) -> bool:
    """Whether the formulas under wrong flags still give the engine's logits under the right ones."""
    got = draft(load(c.config, c.tensors), c.token_ids, c.captured, [NUM_TOKENS])
    return torch.allclose(got, restated(c.config | wrong, c.tensors, c.token_ids, c.captured), atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    "flags", FLAGS[::2], ids=lambda flags: "+".join(name for name in flags if flags[name]) or "none"
)
@pytest.mark.parametrize("name", ["norm_before_residual", "norm_output"])
def test_each_wrong_flag_changes_the_logits(name: str, flags: Config) -> None:
    c = case(flags, 0)
    assert agrees(c, {}) and not agrees(c, {name: not flags[name]})


@pytest.mark.parametrize("name", ["fc_norm", "norm_before_fc"])
def test_leaving_out_a_fusion_norm_changes_the_logits(name: str) -> None:
    c = case({name: True}, 0)
    assert agrees(c, {}) and not agrees(c, {name: False})


@pytest.mark.parametrize("wrong", [{"rms_norm_eps": 1e-6}, {"rope_theta": 500.0}])
def test_wrong_constants_change_the_logits(wrong: Config) -> None:
    assert not agrees(case({}, 0), wrong)


def test_swapped_boundaries_change_the_logits() -> None:
    c = case({}, 0)
    swapped = Case(c.config, c.tensors, c.token_ids, c.captured[:, [1, 0, 2]])
    wanted = restated(c.config, c.tensors, c.token_ids, c.captured)
    assert not torch.allclose(
        draft(load(c.config, c.tensors), c.token_ids, swapped.captured, [NUM_TOKENS]), wanted, atol=CLOSE, rtol=0
    )


def test_wrong_feedback_leaves_the_first_step_right() -> None:
    """The known signature of post-norm feedback on a pre-norm drafter: step 1 is right, later ones are not."""
    c = case({}, 0)
    got = draft(load(c.config | {"norm_output": True}, c.tensors), c.token_ids, c.captured, [NUM_TOKENS])
    wanted = restated(c.config, c.tensors, c.token_ids, c.captured)
    torch.testing.assert_close(got[:NUM_TOKENS], wanted[:NUM_TOKENS], atol=CLOSE, rtol=0)
    assert (got[NUM_TOKENS] - wanted[NUM_TOKENS]).abs().max() > 0.01


# ---- rows


@given(near_blocks(), parents(10), SEEDS)
def test_tree_rows_have_the_bits_of_their_chain(committed: int, tree: list[int], seed: int) -> None:
    token_ids = tokens(committed + len(tree), seed, 96)
    states = base_drafter().fuse(random_states(BASE, len(token_ids), seed))
    run = Drafting(base_drafter(), len(token_ids), seed)
    run.forward(token_ids[:committed], states[:committed])
    got = run.forward(token_ids[committed:], states[committed:], tree)
    for leaf in leaves(tree):
        nodes = committed + torch.tensor(path(tree, leaf))
        rows = torch.cat((torch.arange(committed), nodes))
        wanted = Drafting(base_drafter(), len(rows)).forward(token_ids[rows], states[rows])
        assert torch.equal(got.logits[nodes - committed], wanted.logits[committed:])
        assert torch.equal(got.states[nodes - committed], wanted.states[committed:])


@given(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=5))
def test_logits_only_at_the_wanted_rows(wanted: list[int]) -> None:
    drafter, slots = base_drafter(), shuffled_slots(NUM_TOKENS, 4, 0)
    rows, states = Rows.of(tokens(NUM_TOKENS, 0, 96), [Span(slots, 0, NUM_TOKENS)]), torch.randn(NUM_TOKENS, 64)
    some = drafter(rows, states, drafter.new_cache(40), logit_rows=torch.tensor(wanted))
    every = drafter(rows, states, drafter.new_cache(40))
    assert torch.equal(some.logits, every.logits[wanted]) and torch.equal(some.states, every.states)


# ---- loading


@pytest.mark.parametrize("own", [True, False])
def test_embeddings_are_its_own_or_the_targets(own: bool) -> None:
    c = case({"own_embeddings": own}, 0)
    embedded = load(c.config, c.tensors).embed_tokens
    assert torch.equal(embedded, c.tensors["embed_tokens.weight"] if own else tiny_target().embed_tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_before_fc": True, "norm_output": True}])
def test_what_training_saves_is_what_it_had(flags: Config, dtype: str, tmp_path: Path) -> None:
    c = case(flags, 0)
    tensors = {n: t.bfloat16().to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in c.tensors.items()}
    first = load(c.config | {"dtype": "float32"}, tensors)
    save_drafter(first, tmp_path)
    again = load_drafter(tmp_path, tiny_target(), dtype=torch.float32)
    logits = [draft(drafter, c.token_ids, c.captured, [NUM_TOKENS]) for drafter in (first, again)]
    assert torch.equal(*logits) and torch.equal(first.target_ids, again.target_ids)


Change = Callable[[Tensors], None]


def changed(changes: Config, change: Change) -> Drafter:
    config = BASE | changes
    tensors = drafter_tensors(config)
    change(tensors)
    return load(config, tensors)


NAMES = sorted(drafter_tensors(BASE | {"fc_norm": True, "own_embeddings": True}))


@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_tensor_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        changed({"fc_norm": True, "own_embeddings": True}, lambda tensors: tensors.__delitem__(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_reshaped_tensor_is_named(name: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:-1].clone()

    with pytest.raises(CheckpointError, match=name):
        changed({"fc_norm": True, "own_embeddings": True}, change)


@pytest.mark.parametrize(
    "name", ["layers.0.hidden_norm.weight", "embed_tokens.weight", "input_norm.weight", "fc_norm.0.weight"]
)
def test_a_tensor_that_the_flags_have_no_place_for_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        changed({}, lambda tensors: tensors.update({name: torch.ones(64)}))


def offsets(tensors: Tensors) -> Tensor:
    return tensors["d2t"]


@pytest.mark.parametrize(
    "mutant",
    [
        lambda d2t: d2t + torch.arange(len(d2t)),  # absolute ids
        lambda d2t: torch.arange(len(d2t)),
        lambda d2t: torch.zeros_like(d2t),
        lambda d2t: d2t.flip(0),
        lambda d2t: d2t + 1,
        lambda d2t: (d2t + torch.arange(len(d2t))).flip(0) - torch.arange(len(d2t)),
    ],
    ids=["absolute", "arange", "zeros", "reversed", "shifted", "same tokens in another order"],
)
def test_a_wrong_offset_table_is_refused(mutant: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CheckpointError, match="d2t and t2d disagree"):
        changed({}, lambda tensors: tensors.update(d2t=mutant(offsets(tensors))))


@given(st.sets(st.integers(0, 95), min_size=1), SEEDS)
def test_offsets_name_the_kept_tokens(kept: set[int], seed: int) -> None:
    config = BASE | {"draft_vocab_size": len(kept)}
    tensors, ids = drafter_tensors(config, seed), torch.tensor(sorted(kept))
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(96, dtype=torch.bool).index_fill_(0, ids, True)
    assert load(config, tensors).target_ids.tolist() == sorted(kept)


def test_a_whole_vocabulary_needs_no_offsets() -> None:
    def change(tensors: Tensors) -> None:
        del tensors["d2t"], tensors["t2d"]

    assert changed({"draft_vocab_size": 96}, change).target_ids.tolist() == [*range(96)]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"vocab_size": 97}, "vocab_size"),
        ({"target_hidden_size": 32, "own_embeddings": True}, "target_hidden_size"),
        ({"boundaries": [0, 1, 4]}, r"boundaries=\[0, 1, 4\]"),
        ({"boundaries": [1, 1, 2]}, r"boundaries=\[1, 1, 2\]"),
    ],
)
def test_a_drafter_of_another_target_is_refused(wrong: Config, named: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=named):
        changed(wrong, lambda tensors: None)
