"""The drafter against the published formulas restated in float64, for every kind of wiring and three draft steps; each
wrong flag shows; its rows keep their bits; training computes what serving does; its config says what it means."""

import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.engine import Engine, EngineConfig, Request
from minieagle.models.config import ConfigError
from minieagle.models.drafter_config import DrafterConfig, drafter_config
from minieagle.models.drafter_weights import load_drafter
from minieagle.models.eagle3 import Drafter, DrafterOutput
from minieagle.models.rows import Rows, Span
from minieagle.spec.train import TrainingError, new_drafter, rollout, save_drafter
from minieagle.spec.tree import parse_shape
from tests import embedded
from tests.drafter_oracle import (
    BASE,
    LATENT,
    WIRINGS,
    YARN,
    Config,
    PlainDrafter,
    Shared,
    Tensors,
    drafter_tensors,
    save_drafter_files,
)
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

FLAGS: list[Config] = [
    {"norm_before_residual": residual, "norm_output": output, "fc_norm": norm == "fc_norm"}
    | {"norm_before_fc": norm == "norm_before_fc", "own_embeddings": own}
    for residual, output, norm, own in product(
        [False, True], [False, True], ["none", "fc_norm", "norm_before_fc"], [False, True]
    )
]
SHAPES = st.sampled_from([*WIRINGS.values()])


def load(config: Config, tensors: Tensors) -> Drafter:
    with tempfile.TemporaryDirectory() as directory:
        return load_drafter(save_drafter_files(Path(directory), config, tensors), tiny_target())


@cache
def drafter_of(wiring: str) -> Drafter:
    config = BASE | WIRINGS[wiring]
    return load(config, drafter_tensors(config))


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
    return PlainDrafter(config, tensors, Shared.of(tiny_target())).run(token_ids.tolist(), captured).float()


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


def check_against_the_formulas(changes: Config, seed: int, sizes: list[int]) -> None:
    c = case(changes, seed)
    got = draft(load(c.config, c.tensors), c.token_ids, c.captured, sizes)
    torch.testing.assert_close(got, restated(c.config, c.tensors, c.token_ids, c.captured), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(name for name in flags if flags[name]) or "none")
@settings(max_examples=2)
@given(SHAPES, SEEDS, splits(NUM_TOKENS))
def test_logits_equal_the_formulas_under_all_flags(flags: Config, shape: Config, seed: int, sizes: list[int]) -> None:
    check_against_the_formulas(flags | shape, seed, sizes)


@pytest.mark.parametrize("wiring", WIRINGS)
@settings(max_examples=2)
@given(st.sampled_from(FLAGS), SEEDS, splits(NUM_TOKENS))
def test_logits_equal_the_formulas_in_every_wiring(wiring: str, flags: Config, seed: int, sizes: list[int]) -> None:
    check_against_the_formulas(flags | WIRINGS[wiring], seed, sizes)


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


WRONG: list[tuple[Config, Config]] = [
    ({}, {"rms_norm_eps": 1e-6}),
    ({}, {"rope_theta": 500.0}),
    ({}, {"rope_style": "interleaved"}),
    ({}, {"yarn": YARN}),
    ({}, {"norm_before_head": False}),
    ({}, {"last_state": "post-norm"}),
    ({"qk_norm": True}, {"qk_norm": False}),
    ({"num_hidden_layers": 3}, {"num_hidden_layers": 2}),
    ({"yarn": YARN}, {"yarn": YARN | {"mscale": 1.0}}),
    ({"yarn": YARN}, {"yarn": YARN | {"beta_fast": 1.0}}),
    ({"latent": LATENT}, {"rope_style": "interleaved"}),
    ({"latent": LATENT, "yarn": YARN | {"mscale": 1.0}}, {"yarn": YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}}),
]


@pytest.mark.parametrize(("right", "wrong"), WRONG)
def test_every_wrong_constant_changes_the_logits(right: Config, wrong: Config) -> None:
    c = case(right, 0)
    assert agrees(c, {}) and not agrees(c, wrong)


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


@pytest.mark.parametrize("wiring", ["plain", "latent, two layers, yarn", "three layers", "target's head"])
@settings(max_examples=8)
@given(near_blocks(), parents(10), SEEDS)
def test_tree_rows_have_the_bits_of_their_chain(wiring: str, committed: int, tree: list[int], seed: int) -> None:
    drafter, token_ids = drafter_of(wiring), tokens(committed + len(tree), seed, 96)
    states = drafter.fuse(random_states(BASE, len(token_ids), seed))
    run = Drafting(drafter, len(token_ids), seed)
    run.forward(token_ids[:committed], states[:committed])
    got = run.forward(token_ids[committed:], states[committed:], tree)
    for leaf in leaves(tree):
        nodes = committed + torch.tensor(path(tree, leaf))
        rows = torch.cat((torch.arange(committed), nodes))
        wanted = Drafting(drafter, len(rows)).forward(token_ids[rows], states[rows])
        assert torch.equal(got.logits[nodes - committed], wanted.logits[committed:])
        assert torch.equal(got.states[nodes - committed], wanted.states[committed:])


@given(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=5))
def test_logits_only_at_the_wanted_rows(wanted: list[int]) -> None:
    drafter, slots = drafter_of("plain"), shuffled_slots(NUM_TOKENS, 4, 0)
    rows, states = Rows.of(tokens(NUM_TOKENS, 0, 96), [Span(slots, 0, NUM_TOKENS)]), torch.randn(NUM_TOKENS, 64)
    some = drafter(rows, states, drafter.new_cache(40), logit_rows=torch.tensor(wanted))
    every = drafter(rows, states, drafter.new_cache(40))
    assert torch.equal(some.logits, every.logits[wanted]) and torch.equal(some.states, every.states)


# ---- training


@pytest.mark.parametrize("wiring", WIRINGS)
def test_training_computes_what_serving_does(wiring: str) -> None:
    """Train/serve parity, which is where acceptance is lost without anyone noticing."""
    drafter = drafter_of(wiring)
    token_ids = tokens(NUM_TOKENS + NUM_STEPS, 1, 96)
    states = drafter.fuse(random_states(drafter.config.to_json(), len(token_ids) + 1, 1))
    text = torch.cat((torch.tensor([0]), token_ids))
    steps = list(rollout(drafter, text[None], states, NUM_STEPS + 1))
    run = Drafting(drafter, len(token_ids))
    out = run.forward(token_ids[:NUM_TOKENS], states[:NUM_TOKENS])
    for step, logits in enumerate(steps):
        torch.testing.assert_close(logits[0, NUM_TOKENS - 1], out.logits[-1], atol=CLOSE, rtol=0)
        if step < NUM_STEPS:
            out = run.forward(token_ids[None, NUM_TOKENS + step], out.states[-1:])


TRAINED = [name for name in WIRINGS if name not in ("another width", "target's head")]


@pytest.mark.parametrize("wiring", TRAINED)
def test_every_weight_learns_and_is_saved_whole(wiring: str, tmp_path: Path) -> None:
    config = drafter_config(BASE | WIRINGS[wiring])
    drafter = new_drafter(config, tiny_target(), torch.arange(config.draft_vocab_size), 0)
    states = drafter.fuse(random_states(config.to_json(), NUM_TOKENS, 0))
    steps = rollout(drafter, tokens(NUM_TOKENS, 0, 96)[None], states, 2)
    torch.stack([logits.logsumexp(-1).sum() for logits in steps]).sum().backward()
    unused = ["norm.weight"] if not config.norm_before_head and not config.norm_output else []
    assert [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.any()] == unused
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path, tiny_target(), dtype=torch.float32).named_parameters()
    assert all(torch.equal(p, dict(drafter.named_parameters())[name].bfloat16().float()) for name, p in again)


@pytest.mark.parametrize("changes", [{"own_embeddings": True}, {"own_head": False, "draft_vocab_size": 96}])
def test_what_is_not_trained_is_refused(changes: Config) -> None:
    with pytest.raises(TrainingError, match="own_embeddings"):
        new_drafter(drafter_config(BASE | changes), tiny_target(), torch.arange(40), 0)


# ---- the engine


SIZES: Config = {"hidden_size": 256, "target_hidden_size": 256, "vocab_size": 4096, "boundaries": [8, 2]}


def generated(drafter: Drafter | None, tree: str) -> list[list[int]]:
    engine = Engine(
        embedded.target(), embedded.tokenizer(), drafter=drafter, config=EngineConfig(shape=parse_shape(tree))
    )
    params = embedded.params(max_tokens=12)
    requests = [Request(embedded.prompt(i), params, spec=drafter is not None) for i in range(2)]
    return [embedded.tokens(outputs) for outputs in embedded.run(engine, requests)]


@cache
def generated_plainly() -> list[list[int]]:
    return generated(None, "chain:1")


@pytest.mark.parametrize("wiring", ["three layers", "latent, two layers, yarn", "last state normed", "target's head"])
def test_speculation_is_invisible_with_any_drafter(wiring: str, tmp_path: Path) -> None:
    """Untrained ones accept next to nothing, which exercises every rollback."""
    config = BASE | SIZES | WIRINGS[wiring] | {"draft_vocab_size": 4096 if wiring == "target's head" else 40}
    drafter = load_drafter(save_drafter_files(tmp_path, config, drafter_tensors(config)), embedded.target())
    assert generated(drafter, "dynamic:3,3,6") == generated_plainly()


# ---- its config


CONFIGS = st.builds(lambda flags, wiring: drafter_config(BASE | flags | wiring), st.sampled_from(FLAGS), SHAPES)


@given(CONFIGS)
def test_a_config_survives_json(config: DrafterConfig) -> None:
    assert drafter_config(json.loads(json.dumps(config.to_json()))) == config


REFUSED: list[tuple[Config, str]] = [
    ({"rope_style": "neox"}, "rope_style='neox'"),
    ({"last_state": "normed"}, "last_state='normed'"),
    ({"boundaries": []}, "boundaries"),
    ({"boundaries": [1, -1]}, "boundaries"),
    ({"head_dim": 15}, "head_dim=15"),
    ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc=true and fc_norm=true"),
    ({"latent": LATENT, "qk_norm": True}, "qk_norm"),
    ({"latent": LATENT | {"qk_rope_head_dim": 7}}, "qk_rope_head_dim=7"),
    ({"latent": {"kv_lora_rank": 8}}, "latent is incomplete"),
    ({"latent": LATENT | {"rank": 8}}, "a field too many"),
    ({"latent": 8}, "latent=8"),
    ({"yarn": {"factor": 8.0}}, "yarn is incomplete"),
    ({"yarn": "yarn"}, "yarn='yarn'"),
    ({"own_head": False}, "own_head=false"),
    ({"hidden_size": 48}, "embed_tokens of its own"),
    ({"hidden_size": 48, "own_embeddings": True, "own_head": False, "draft_vocab_size": 96}, "lm_head of its own"),
    ({"draft_vocab_size": 97}, "draft_vocab_size=97"),
    ({"num_attention_heads": 5}, "num_attention_heads=5"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"norm_output": "yes"}, "norm_output='yes'"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_a_config_that_cannot_be_meant_is_refused(changes: Config, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        drafter_config(BASE | changes)


def test_wirings_differ_in_what_they_cache() -> None:
    config = drafter_config(BASE)
    assert config.cache_row == (2, 32) and replace(config, num_key_value_heads=1).cache_row == (1, 32)
    assert drafter_of("latent").config.cache_row == (1, 48)
    assert drafter_of("three layers").new_cache(5).data.shape == (3, 5, 2, 32)
