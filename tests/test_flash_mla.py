"""The library's attention over committed rows, merged with ours over the tree, against models/attention.py.

flashinfer needs a GPU: a stand-in with its interface, as its documentation gives it, takes its place, so that what is
handed over the edge is tested and the kernel itself is not.
"""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minieagle.models.attention import AttentionPlan
from minieagle.models.flash_mla import FlashInferPrefix, FlashPlan, merge
from minieagle.models.rows import Rows, Span
from tests import embedded
from tests.strategies import SEEDS, ancestors, near_blocks, parents, shuffled_slots

HEADS, ROPE, RANK = 4, 8, 32


class Wrapper:
    """BatchMLAPagedAttentionWrapper by its documented shapes and meanings; counts nothing, splits nothing."""

    def __init__(self, workspace: Tensor, *, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and backend in ("fa2", "fa3")

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int,
        head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, *dtypes: torch.dtype,
    ) -> None:  # fmt: skip
        assert len(dtypes) == 2
        self.num_heads, self.rank, self.rope = num_heads, head_dim_ckv, head_dim_kpe
        assert page_size == 1 and not causal and kv_len_arr.tolist() == kv_indptr.diff().tolist()
        assert {t.dtype for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        rows, keys = qo_indptr.tolist(), kv_indptr.tolist()
        self.parts = [
            (slice(rows[i], rows[i + 1]), kv_indices[keys[i] : keys[i + 1]].long()) for i in range(len(rows) - 1)
        ]
        self.scale = sm_scale

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, *, return_lse: bool) -> tuple[Tensor, Tensor]:
        assert return_lse and q_nope.is_contiguous() and q_pe.is_contiguous()
        assert ckv.shape[1:] == (1, self.rank) and kpe.shape[1:] == (1, self.rope)
        assert q_nope.shape[1:] == (self.num_heads, self.rank) and q_pe.shape[1:] == (self.num_heads, self.rope)
        out, lse = torch.empty_like(q_nope), torch.empty(q_nope.shape[:2])
        for rows, slots in self.parts:
            latent, rotary = ckv[slots, 0].float(), kpe[slots, 0].float()
            scores = self.scale * (q_nope[rows].float() @ latent.t() + q_pe[rows].float() @ rotary.t())
            out[rows] = (scores.softmax(-1) @ latent).to(out.dtype)
            lse[rows] = scores.logsumexp(-1) / math.log(2)
        return out, lse


@pytest.fixture(autouse=True, scope="module")
def _installed():
    module: Any = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = Wrapper
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
        patch.setitem(sys.modules, "flashinfer.mla", module)
        yield


def prefix(dtype: torch.dtype) -> FlashInferPrefix:
    return FlashInferPrefix(torch.device("cpu"), HEADS, RANK, ROPE, dtype)


def spans_of(drawn: list[tuple[int, list[int] | None, int]], seed: int) -> list[Span]:
    """Sequences of 0 or more committed rows, each with a tree or a chain."""
    counts = [committed + (num if tree is None else len(tree)) for committed, tree, num in drawn]
    slots = shuffled_slots(sum(counts), 1, seed).split(counts)
    return [
        Span(own, committed, num if tree is None else len(tree), None if tree is None else ancestors(tree))
        for own, (committed, tree, num) in zip(slots, drawn, strict=True)
    ]


def both(spans: list[Span], seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The merged attention, and ours."""
    draw = torch.Generator().manual_seed(seed)
    num_slots = 1 + max(int(span.slots.max()) for span in spans)
    cache = torch.randn(num_slots, 1, ROPE + RANK, generator=draw).to(dtype)
    cache[0] = 0
    rows = Rows.of(torch.zeros(sum(span.num_rows for span in spans), dtype=torch.int64), spans)
    q = torch.randn(rows.token_ids.shape[0], HEADS, ROPE + RANK, generator=draw).to(dtype).float() * 0.3
    widths = {"key_width": ROPE + RANK, "value_start": ROPE}
    merged = FlashPlan.of(rows, prefix(dtype)).attend(q, cache, **widths)
    return merged, AttentionPlan.of(rows).attend(q, cache, **widths)


SPANS = st.tuples(st.just(0) | near_blocks(), st.none() | parents(8), st.integers(1, 6))


@given(st.lists(SPANS, min_size=1, max_size=4), SEEDS)
def test_merged_attention_is_ours(drawn: list[tuple[int, list[int] | None, int]], seed: int) -> None:
    merged, ours = both(spans_of(drawn, seed), seed, torch.float32)
    torch.testing.assert_close(merged, ours, atol=1e-5, rtol=0)


def test_bfloat16_is_off_by_its_rounding() -> None:
    merged, ours = both(spans_of([(100, [-1, 0, 0], 0), (70, None, 5)], 0), 0, torch.bfloat16)
    assert 0 < float((merged - ours).abs().max()) < 2.0**-6 * float(ours.abs().max())


def test_a_tree_grown_level_by_level_sees_its_upper_levels() -> None:
    (whole,) = spans_of([(66, [-1, 0, 0, 1, 2], 0)], 1)
    assert whole.ancestors is not None
    lower = Span(whole.slots, 66, 2, whole.ancestors[3:], first=3)
    merged, ours = both([lower], 1, torch.float32)
    torch.testing.assert_close(merged, ours, atol=1e-5, rtol=0)


def test_a_chain_sees_all_rows_before_it() -> None:
    """Rows 3 and 4 of a chain whose first rows were stored by an earlier forward."""
    (whole,) = spans_of([(66, None, 5)], 1)
    chain = Span(whole.slots, 66, 2, None, first=3)
    merged, _ = both([chain], 1, torch.float32)
    _, ours = both([Span(whole.slots, 69, 2)], 1, torch.float32)
    torch.testing.assert_close(merged, ours, atol=1e-5, rtol=0)


@given(st.floats(-50, 50), st.floats(-50, 50), SEEDS)
def test_merging_is_one_softmax_over_both_sets(up: float, down: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(7, generator=draw, dtype=torch.float64) + torch.tensor([up] * 3 + [down] * 4).double()
    values = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    parts = [(scores[cut].softmax(0) @ values[cut], scores[cut].logsumexp(0)) for cut in (slice(3), slice(3, 7))]
    torch.testing.assert_close(merge(*parts[0], *parts[1]), scores.softmax(0) @ values)


def test_a_target_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt rows without a prefix, then a tree behind them: other roundings, the same logits."""
    target, slots = embedded.target(), torch.arange(1, 120)
    prompt = Rows.of(torch.arange(90), [Span(slots, 0, 90)])
    tree = Rows.of(torch.arange(4), [Span(slots, 90, 4, ancestors([-1, 0, 0, 2]))])
    caches = [target.new_cache(120) for _ in range(2)]
    wanted = [target(rows, caches[0]).logits for rows in (prompt, tree)]
    widths = target.config.num_attention_heads, target.config.kv_lora_rank, target.config.qk_rope_head_dim
    monkeypatch.setattr(target, "prefix", FlashInferPrefix(torch.device("cpu"), *widths, target.dtype))
    found = [target(rows, caches[1]).logits for rows in (prompt, tree)]
    for got, logits in zip(found, wanted, strict=True):
        assert 0 < float((got - logits).square().mean().sqrt()) < 0.05 * float(logits.std())


def test_widths_that_the_kernel_is_not_made_for_are_not_taken() -> None:
    assert not FlashInferPrefix.takes(64, 16, torch.bfloat16)
    assert not FlashInferPrefix.takes(512, 64, torch.float32)
