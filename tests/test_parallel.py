"""Tensor parallel, in groups of real processes: what 2, 4 and 8 ranks compute is what one rank computes.

Bit for bit where every sum is cut into eight slices whatever the number of ranks, up to rounding where it is not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, note, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from minieagle.dist.ranks import ALONE, Ranks
from minieagle.dist.shard import ShardError, rank_bytes
from minieagle.llm import embedded
from minieagle.models.drafter_config import DrafterConfig, LatentSizes
from minieagle.models.int4 import Int4Linear, dequantize
from minieagle.models.layers import SlicedLinear
from minieagle.models.shards import Shards
from minieagle.models.target_names import WRAPPER
from minieagle.models.target_weights import load_target
from minieagle.quantize import quantize_directory
from tests import published
from tests.oracles import save_target
from tests.rank_worker import Groups, generate, run_rows
from tests.strategies import SEEDS, an_expert, target_configs

SLICES = 8
NO_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]  # a smaller failing model tells little and takes minutes
SIZES = (2, 4, 8)
CUT: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 96,
    "intermediate_size": 96,
    "eos_token_id": None,
}
KINDS = st.sampled_from(["float32", "bfloat16", "int4 of 8", "int4 of 32"])


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    started = Groups()
    yield started
    started.close()


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Where this module's models lie until its end."""
    return tempfile.TemporaryDirectory()


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=folder().name))


def saved(config: dict[str, Any], kind: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random model of that kind whose sizes eight ranks can share, and no rank gets fewer than 12 columns of a
    product, which float32 products on a CPU round otherwise."""
    wide = {"float32": 64, "int4 of 8": 64, "int4 of 32": 256}.get(kind, config["moe_intermediate_size"])
    hidden = {"int4 of 32": 64}.get(kind, config["hidden_size"])
    sizes = config | CUT | {"moe_intermediate_size": wide, "hidden_size": hidden}
    sizes["qk_nope_head_dim"] = max(16, config.get("qk_nope_head_dim", 16))
    if kind.startswith("int4"):
        sizes["first_k_dense_replace"] = 0
    plain = save_target(new_folder(), seed, dtype=getattr(torch, kind, dtype), **sizes)
    if not kind.startswith("int4"):
        return plain
    return int4(plain, int(kind.split()[-1]))


def int4(plain: Path, group_size: int) -> Path:
    quantize_directory(plain, made := new_folder() / "int4", group_size=group_size)
    return made


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask_forward(groups: Groups, size: int, model: Path, ids: list[int], **case: Any) -> tuple[list[Any], list[Any]]:
    """Each rank's reply and each rank's tensors."""
    out = str(new_folder() / "out")
    replies = groups.ask(task="forward", size=size, model=str(model), tokens=ids, out=out, **case)
    return replies, [load_file(f"{out}.{rank}.safetensors") for rank in range(size)]


MODELS = st.builds(saved, target_configs(), KINDS, SEEDS)


# ---- logits and captured states


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=8, phases=NO_SHRINKING)
@given(model=MODELS, seed=SEEDS, count=st.integers(1, 20))
def test_eight_slices_give_the_same_bits_on_any_number_of_ranks(
    groups: Groups, size: int, model: Path, seed: int, count: int
) -> None:
    alone = run_rows(load_target(model, shards=Shards(slices=SLICES)), tokens(seed, count))
    replies, outs = ask_forward(groups, size, model, tokens(seed, count), slices=SLICES)
    note((model / "config.json").read_text())
    assert [reply["meta"] for reply in replies] == [0] * size
    assert all(torch.equal(out["captured"], alone.captured) for out in outs)
    assert torch.equal(outs[0]["logits"], alone.logits)


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=4, phases=NO_SHRINKING)
@given(config=target_configs(), kind=KINDS, seed=SEEDS, topk=st.integers(1, 8))
def test_whole_experts_give_the_same_bits_on_any_number_of_ranks(
    groups: Groups, size: int, config: dict[str, Any], kind: str, seed: int, topk: int
) -> None:
    dealt = {"n_routed_experts": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": topk}
    model = saved(config | dealt, kind, seed)
    alone = run_rows(load_target(model, shards=Shards(slices=SLICES, expert_parallel=True)), tokens(seed, 9))
    _, outs = ask_forward(groups, size, model, tokens(seed, 9), slices=SLICES, expert_parallel=True)
    assert all(torch.equal(out["captured"], alone.captured) for out in outs)
    assert torch.equal(outs[0]["logits"], alone.logits)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=3, phases=NO_SHRINKING)
@given(config=target_configs(), seed=SEEDS)
def test_by_default_ranks_differ_by_rounding_only(groups: Groups, size: int, config: dict[str, Any], seed: int) -> None:
    model = saved(config, "float32", seed)
    whole = run_rows(load_target(model), tokens(seed, 9))
    _, outs = ask_forward(groups, size, model, tokens(seed, 9), slices=size)
    assert all(torch.equal(out["captured"], outs[0]["captured"]) for out in outs)
    assert difference(outs[0]["captured"], whole.captured) < 1e-4
    assert difference(outs[0]["logits"], whole.logits) < 1e-4


def test_negative_control_a_partial_capture_shows(groups: Groups) -> None:
    model = saved({"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}, "bfloat16", 0)
    alone = run_rows(load_target(model, shards=Shards(slices=SLICES)), tokens(0, 9))
    _, outs = ask_forward(groups, 2, model, tokens(0, 9), slices=SLICES, mutant="skip a sum")
    assert not torch.equal(outs[0]["captured"], outs[1]["captured"])
    assert not any(torch.equal(out["captured"], alone.captured) for out in outs)


# ---- what a rank holds


def stored_bytes(model: Path, size: int) -> int:
    """What dist/shard.py says that one of `size` ranks holds. The stated shapes of INT4 are checked and not held."""
    total = 0
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if not name.endswith("weight_shape"):
                tensor = file.get_tensor(name)
                total += rank_bytes(name.removeprefix(WRAPPER), tensor.nbytes, size)
    return total


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=3, phases=NO_SHRINKING)
@given(config=target_configs(), kind=st.sampled_from(["float32", "int4 of 8"]), seed=SEEDS)
def test_every_rank_holds_the_bytes_that_the_table_of_cuts_says(
    groups: Groups, size: int, config: dict[str, Any], kind: str, seed: int
) -> None:
    """In float32, where nothing is widened, and with groups that stay as they are stored."""
    assume(not config["tie_word_embeddings"])  # stored once, held twice
    model = saved(config, kind, seed, torch.float32)
    replies, _ = ask_forward(groups, size, model, [1], slices=size)
    assert [reply["bytes"] for reply in replies] == [stored_bytes(model, size)] * size


def placed(rank: int, size: int) -> Ranks:
    """One of several ranks, without the others: enough to load."""
    ranks = Ranks(ALONE)
    ranks.rank, ranks.size = rank, size
    return ranks


def experts_of(model: Path, shards: Shards) -> list[Tensor]:
    """gate, up and down of the first expert of the last layer, dequantised."""
    expert = an_expert(load_target(model, shards=shards))
    down = list(expert.down.parts) if isinstance(expert.down, SlicedLinear) else [expert.down]
    (gate, up), wide = dense(expert.gate_up).chunk(2), [dense(part) for part in down]
    return [gate, up, torch.cat(wide, dim=1)]


def dense(product: torch.nn.Module) -> Tensor:
    """An INT4 weight in float32, from the words and scales that are kept as they came: groups of 8 are."""
    assert isinstance(product, Int4Linear) and not product.native
    return dequantize(product.codes, product.scale, torch.float32)


@settings(max_examples=4, phases=NO_SHRINKING)
@given(size=st.sampled_from(SIZES), slices=st.sampled_from([None, SLICES]), seed=SEEDS)
def test_int4_slices_dequantise_to_slices_of_the_whole(size: int, slices: int | None, seed: int) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_intermediate_size": 64}
    model = saved(sizes, "int4 of 8", seed, torch.float32)
    whole = experts_of(model, Shards())
    parts = [experts_of(model, Shards(placed(rank, size), slices or size)) for rank in range(size)]
    for index, dim in enumerate((0, 0, 1)):
        assert torch.equal(torch.cat([part[index] for part in parts], dim=dim), whole[index])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads=6 .*4 pieces.*\\[1, 2\\]"),
        ({"vocab_size": 98}, "vocab_size=98 .*4 pieces.*\\[1, 2\\]"),
        ({"intermediate_size": 90}, "intermediate_size=90 .*4 pieces.*\\[1, 2\\]"),
        ({"moe_intermediate_size": 33}, "moe_intermediate_size=33 .*4 pieces.*\\[1\\]"),
    ],
)
def test_what_four_ranks_cannot_share_is_refused_with_what_works(sizes: dict[str, int], words: str) -> None:
    changes: dict[str, Any] = dict(sizes)
    model = save_target(new_folder(), **changes)
    with pytest.raises(ShardError, match=words):
        load_target(model, shards=Shards(placed(0, 4), 4))


def test_groups_of_int4_are_not_cut_apart() -> None:
    sizes: dict[str, Any] = CUT | {"hidden_size": 32, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    plain = save_target(new_folder(), **sizes)
    model = int4(plain, 32)
    with pytest.raises(ShardError, match=r"columns of .*down_proj=64 .*4 pieces of multiples of 32.*\[1, 2\]"):
        load_target(model, shards=Shards(placed(0, 4), 4))


def test_slices_must_be_a_multiple_of_the_ranks() -> None:
    with pytest.raises(ShardError, match="slices=6 must be 1 or more and a multiple of .* 4: such as 4"):
        Shards(placed(0, 4), 6)


# ---- tokens


def runs(*trees: str) -> list[dict[str, Any]]:
    """Greedy and sampled, each plainly and then with every tree."""
    shapes = [{"spec": False}, *[{"spec": True, "tree": tree} for tree in trees]]
    return [{"temperature": temperature} | shape for temperature in (0.0, 0.9) for shape in shapes]


def a_case(model: Path, drafter: Path, seed: int, *trees: str, max_tokens: int, vocab: int = 96) -> dict[str, Any]:
    prompts = [[token % vocab for token in tokens(seed + index, 3 + 6 * index)] for index in range(2)]
    sizes = {"slices": SLICES, "prompts": prompts, "max_tokens": max_tokens}
    return {"model": str(model), "drafter": str(drafter), "runs": runs(*trees)} | sizes


def check_invisible(found: list[Any]) -> None:
    """Within a temperature all runs give the same tokens."""
    half = len(found) // 2
    assert all(run == found[0] for run in found[:half]) and all(run == found[half] for run in found[half:])


def check_same(replies: list[Any], alone: Any) -> None:
    """One rank's tokens, from caches that hold the same bits on every rank and on one."""
    assert replies[0]["runs"] == alone["runs"]
    assert all(reply["caches"] == alone["caches"] for reply in replies)
    check_invisible(alone["runs"])


def drafter_for(seed: int, *, latent: bool) -> Path:
    """A random drafter for TINY's width and vocabulary, with grouped or latent attention."""
    config = DrafterConfig(
        hidden_size=64,
        target_hidden_size=64,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=4 if latent else 2,
        head_dim=published.HEAD_DIM,
        vocab_size=96,
        draft_vocab_size=published.DRAFT_VOCAB,
        boundaries=(0, 1, 2),
        max_position_embeddings=512,
        latent=LatentSizes(**published.LATENT) if latent else None,
    )
    return published.write(new_folder() / "drafter", config.to_json(), published.tensors(latent=latent, seed=seed))


TINY_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=2, phases=NO_SHRINKING)
@given(kind=KINDS, q_rank=st.sampled_from([None, 24]), seed=SEEDS, latent=st.booleans())
def test_tokens_are_those_of_one_rank(
    groups: Groups, size: int, kind: str, q_rank: int | None, seed: int, latent: bool
) -> None:
    model = saved(TINY_SIZES | {"q_lora_rank": q_rank}, kind, seed)
    case = a_case(model, drafter_for(seed, latent=latent), seed, "chain:2", "dynamic:2,3,5", max_tokens=4)
    check_same(groups.ask(task="generate", size=size, **case), generate(Ranks(ALONE), case))


@cache
def embedded_case() -> dict[str, Any]:
    return a_case(embedded("target"), embedded("drafter"), 3, "dynamic:3,3,6", max_tokens=6)


@cache
def embedded_alone() -> Any:
    return generate(Ranks(ALONE), embedded_case())


@pytest.mark.parametrize("size", SIZES)
def test_the_embedded_model_gives_the_same_tokens_on_any_number_of_ranks(groups: Groups, size: int) -> None:
    check_same(groups.ask(task="generate", size=size, **embedded_case()), embedded_alone())


def test_the_runs_above_accept_drafts() -> None:
    """Otherwise no rank would ever have moved a row."""
    assert embedded_alone()["num_moved"] > 0


def test_garbage_in_place_of_a_followers_logits_changes_nothing(groups: Groups) -> None:
    check_same(groups.ask(task="generate", size=2, mutant="own logits", **embedded_case()), embedded_alone())


def with_ties(model: Path) -> Path:
    """The model with every token's row of the head there twice: token t, of rank 0, ties with t + 48, of rank 1."""
    stored = load_file(model / "model.safetensors")
    stored["lm_head.weight"] = torch.cat([stored["lm_head.weight"][:48]] * 2)
    save_file(stored, model / "model.safetensors")
    return model


def test_one_ulp_on_a_follower_at_a_tie_hangs_nobody_and_diverges_nowhere(groups: Groups) -> None:
    """Rank 1's part of the logits is one unit in the last place higher: rank 0 decides from that, for all."""
    model = with_ties(saved(TINY_SIZES | {"tie_word_embeddings": False}, "bfloat16", 0))
    case = a_case(model, drafter_for(0, latent=False), 0, "dynamic:2,3,5", max_tokens=6)
    even = groups.ask(task="generate", size=2, **case)
    raised = groups.ask(task="generate", size=2, mutant="one ulp", **case)
    assert max(even[0]["runs"][0][0]) < 48 <= min(raised[0]["runs"][0][0])
    check_invisible(raised[0]["runs"])
    assert raised[0]["caches"] == raised[1]["caches"]


def test_negative_control_a_wrong_follower_shows_in_its_caches(groups: Groups) -> None:
    """One that takes each sequence's handle for the first of its slots goes on consistently, but not with rank 0."""
    replies = groups.ask(task="generate", size=2, mutant="handle among slots", **embedded_case())
    assert replies[0]["caches"] != replies[1]["caches"]
