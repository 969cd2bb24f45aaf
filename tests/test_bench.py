"""The benches: each runs through in a tiny setting, and what they count is checked against a count made another way.

The model is the synthetic one at toy size with its random drafter, so nothing here depends on what a drafter learned.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench import acceptance, decode, drafter_ranks, exactness, limits, report, stream, synthetic
from bench.prompts import read_prompts
from bench.runs import load, repeated_4grams
from bench.twin import write_twin
from minieagle.dist.ranks import ALONE, Ranks
from minieagle.errors import ModelError
from minieagle.models.int4 import unpack
from minieagle.models.layers import Linear
from minieagle.models.mla import LatentAttention
from minieagle.models.rows import Rows, Span
from minieagle.models.shards import WHOLE, Shards

TINY = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with target, drafter and target-bf16."""
    directory = tmp_path_factory.mktemp("synthetic") / "model"
    settings = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    assert synthetic.main([str(directory), "--bf16", *settings]) == 0
    return directory


@pytest.fixture
def options(model: Path) -> list[str]:
    return ["--model", str(model / "target"), "--drafter", str(model / "drafter")]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    lines = [{"category": name, "messages": [{"role": "user", "content": name}]} for name in ("dialogue", "stories")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines for _ in range(2)))
    return tmp_path / "prompts.jsonl"


# ---- synthetic checkpoint and its twin


def test_the_same_seed_writes_the_same_weights_and_another_seed_others(model: Path, tmp_path: Path) -> None:
    synthetic.write_target(tmp_path / "again", TINY, seed=0)
    synthetic.write_target(tmp_path / "other", TINY, seed=1)
    first, again, other = (tensors(path) for path in (model / "target", tmp_path / "again", tmp_path / "other"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_synthetic_states_stay_near_unit_size(model: Path) -> None:
    loaded = load(model / "target", None, [])
    text = torch.tensor(limits.own_text(loaded, 40))
    rows = Rows.of(text, [Span(torch.arange(1, 41), 0, 40)])
    out = loaded.target(rows, loaded.target.new_cache(41), boundaries=(0, 2))
    assert 0.5 < out.captured.float().std() < 4 and 0.5 < out.logits.std() < 8


def test_a_verify_pass_counts_its_experts(model: Path) -> None:
    loaded = load(model / "target", None, [])
    verify = limits.VerifyPass(loaded.target, limits.own_text(loaded, 40), 20)
    assert verify.experts(1) == TINY["num_experts_per_tok"]
    assert TINY["num_experts_per_tok"] < verify.experts(16) <= TINY["n_routed_experts"]


def test_the_twin_holds_code_times_scale(model: Path) -> None:
    packed, twin = tensors(model / "target"), tensors(model / "target-bf16")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    scale = packed[f"{name}_scale"].float().repeat_interleave(32, dim=1)
    assert torch.equal(twin[name], (unpack(packed[f"{name}_packed"]) * scale).bfloat16())
    assert not any("packed" in name for name in twin) and torch.equal(twin["lm_head.weight"], packed["lm_head.weight"])


def test_a_twin_of_another_model_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic.write_target(tmp_path / "other", TINY | {"rope_theta": 500.0}, seed=0)
    write_twin(tmp_path / "other", tmp_path / "twin")
    assert decode.main([*options, "--twin", str(tmp_path / "twin")]) == 2
    assert "is not the twin of" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["hidden_size=65", "no_such_field=1", "vocab_size=100", "q_lora_rank"])
def test_a_field_that_cannot_be_is_refused(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synthetic.main([str(tmp_path / "new"), "--set", setting]) == 2
    assert setting.split("=")[0] in capsys.readouterr().err


# ---- the runs


def test_decode_compares_all_four(model: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    twin = ["--twin", str(model / "target-bf16")]
    small = ["--num-prompts", "2", "--max-tokens", "6", "--rounds", "1", "--ignore-eos"]
    assert decode.main([*options, *twin, *small]) == 0
    printed = capsys.readouterr().out
    for name in ("plain", "chain:5", "dynamic:4,4,16", "transformers", "command: python bench/decode.py", "machine: "):
        assert name in printed


def test_decode_without_a_drafter_says_what_is_left_out(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--num-prompts", "1", "--max-tokens", "4", "--rounds", "1", "--no-transformers"]
    assert decode.main(["--model", str(model / "target"), *small]) == 0
    printed = capsys.readouterr().out
    assert "chain and tree are left out" in printed and "| chain:5" not in printed


def test_decode_refuses_a_text_beyond_the_context(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main([*options, "--max-tokens", "256", "--no-transformers"]) == 2
    assert "lower --max-tokens" in capsys.readouterr().err


def test_limits_prints_its_tables(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--context", "40", "--steps", "3", "--rounds", "1", "--rows", "2", "4", "--buffer-mb", "1", "--profile"]
    assert limits.main(["--model", str(model / "target"), *small]) == 0
    printed = capsys.readouterr().out
    assert "share of the limit" in printed and "outside operators" in printed and "| 4 " in printed


def test_acceptance_prints_categories_and_ratios(
    options: list[str], prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--prompts", str(prompts_file), "--max-tokens", "6", "--trees", "dynamic:2,2,5", "--chain", "2"]
    assert acceptance.main([*options, *small]) == 0
    printed = capsys.readouterr().out
    for text in (
        " stories |",
        " all |",
        "dynamic:2,2,5, greedy / chain:2, greedy",
        "temperature 0.7 / chain:2, greedy",
    ):
        assert text in printed


# ---- what is counted


def test_bytes_are_those_of_the_file(model: Path) -> None:
    """On the bf16 twin every byte of the file is read by some footprint; what is kept in float32 is twice as wide."""
    part = limits.Footprint.of(load(model / "target-bf16", None, []).target)
    stored = tensors(model / "target-bf16")
    wide = sum(
        tensor.nbytes for name, tensor in stored.items() if name.endswith(("mlp.gate.weight", "kv_b_proj.weight"))
    )
    embedding = stored.pop("model.embed_tokens.weight").nbytes
    counted = part.expert * TINY["n_routed_experts"] + part.rest + part.head
    assert counted == sum(tensor.nbytes for tensor in stored.values()) + wide
    assert part.embedding_row * TINY["vocab_size"] == embedding


def test_int4_experts_count_half_a_byte_a_weight_and_two_numbers_a_group(model: Path) -> None:
    part = limits.Footprint.of(load(model / "target", None, []).target)
    weights = 3 * TINY["hidden_size"] * TINY["moe_intermediate_size"]
    assert part.expert == weights / 2 + weights / 32 * 2 * 2


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=3))
def test_repeated_4grams_against_a_naive_count(texts: list[list[int]]) -> None:
    windows = [(t, i) for t, text in enumerate(texts) for i in range(len(text) - 3)]
    again = [(t, i) for t, i in windows if any(texts[t][j : j + 4] == texts[t][i : i + 4] for j in range(i))]
    expected = len(again) / len(windows) if windows else 0.0
    assert repeated_4grams([tuple(text) for text in texts]) == pytest.approx(expected)


def test_fewer_prompts_are_spread_over_the_file(prompts_file: Path) -> None:
    assert [prompt.category for prompt in read_prompts(prompts_file, 2)] == ["dialogue", "stories"]
    with pytest.raises(ModelError, match="must be in 1..4"):
        read_prompts(prompts_file, 5)


def test_another_busy_process_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for load_average, warned in ((0.1, False), (1.7, True)):
        monkeypatch.setattr("os.getloadavg", lambda load_average=load_average: (load_average, 0.0, 0.0))
        report.Report.begin("decode", [])
        assert ("warning: load average 1.70" in capsys.readouterr().out) is warned


# ---- exactness


@pytest.fixture
def small_matrix(options: list[str], prompts_file: Path, tmp_path: Path) -> list[str]:
    cells = ["t0/chain:5/batch8/page1/chunk7", "t0.7/dynamic:3,3,8/alone/page64/chunk1"]
    prompts = ["--prompts", str(prompts_file), "--max-tokens", "5"]
    return [*options, *prompts, "--cells", *cells, "--out", str(tmp_path / "out")]


def test_the_matrix_is_that_of_the_issue() -> None:
    cells = exactness.matrix(exactness.SHAPES)
    speculative = [cell for cell in cells if cell.shape != "plain"]
    assert len(speculative) == 3 * 3 * 2 * 3 * 3 and len(cells) == len(speculative) + 3 * 2 * 3 * 3 - 3


def test_exactness_finds_no_difference_and_resumes(small_matrix: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exactness.main(small_matrix) == 0
    assert "2 cells, 0 done before" in capsys.readouterr().out
    assert exactness.main(small_matrix) == 0
    assert "2 cells, 2 done before" in capsys.readouterr().out


def test_exactness_fails_on_one_differing_bit(
    small_matrix: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exactness.main(small_matrix) == 0
    (tmp_path / "out/cells.jsonl").unlink()
    reference = tmp_path / "out/reference-0.safetensors"
    tampered = load_file(reference)
    tampered["logprobs"].view(torch.int32)[2, 3] ^= 1
    save_file(tampered, reference)
    capsys.readouterr()
    assert exactness.main(small_matrix) == 1
    printed = capsys.readouterr().out
    assert "chunk7: 1 differ" in printed and "prompt 2, new token 3" in printed and "top-2 logit gaps" in printed


def test_exactness_refuses_results_of_other_settings(
    small_matrix: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exactness.main([*small_matrix, "--sample", "1"]) == 0
    assert exactness.main([*small_matrix, "--max-tokens", "6"]) == 2
    assert "max_tokens differ" in capsys.readouterr().err


def test_exactness_in_two_processes(small_matrix: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exactness.main([*small_matrix, "--processes", "2"]) == 0
    assert "2/2 " in capsys.readouterr().out


# ---- drafters over ranks


def test_a_drafter_s_parts_are_all_of_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "target_hidden_size": 16}
    config = replace(drafter_ranks.config_of(64), vocab_size=64, **sizes)
    whole, cut = (drafter_ranks.random_drafter(config, shards) for shards in (WHOLE, Shards(Ranks(ALONE), 1)))
    products = [m.dense_weight() for m in whole.modules() if isinstance(m, Linear)]
    attention = whole.midlayer.attention
    assert isinstance(attention, LatentAttention)
    total = sum(w.nbytes for w in (*products, attention.w_uk, attention.w_uv))
    assert sum(drafter_ranks.part_bytes(whole)) == total
    monkeypatch.setattr(drafter_ranks, "ROUNDS", 1)
    assert len(list(drafter_ranks.timed(whole, cut))) == len(drafter_ranks.ROWS)
    assert len(drafter_ranks.exchange(Ranks(ALONE), cut)) == len(drafter_ranks.ROWS)


# ---- a streamed target


def test_a_pass_runs_over_as_many_tokens_as_it_says(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    observe = stream.observe_texts
    monkeypatch.setattr(stream, "observe_texts", lambda s, texts, b: seen.append(len(texts[0])) or observe(s, texts, b))
    monkeypatch.setattr(stream, "LENGTHS", (3, 5))
    monkeypatch.setattr(stream, "ROUNDS", 2)
    found = stream.rates(model / "target")
    assert [name for name, _ in found] == ["plain", "read-ahead", "a pass over 3 tokens", "a pass over 5 tokens"]
    assert seen == [3, 5, 3, 5] and all(rate > 0 for _, rate in found)
