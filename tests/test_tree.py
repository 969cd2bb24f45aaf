"""Trees against plain Python: shapes, derived views, and growth whatever ties, NaN and infinities the scores hold."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.spec.tree import (
    Path,
    Pool,
    Shape,
    ShapeError,
    StaticTree,
    Tree,
    TreeShape,
    parse_shape,
    rerank,
    top_children,
)

SCORES = st.sampled_from([0.0, -0.0, -1.0, -1.5, -2.0, 1.0, math.inf, -math.inf, math.nan])
VOCAB = 5
ROW = (0.0, -1.0, -2.0, -3.0, math.nan)  # integers tie across paths; 0 ties a child with its parent


@st.composite
def trees(draw: st.DrawFn, vocab: int = 4) -> Tree:
    parents = [draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 12)))]
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(len(parents) + 1)]
    return Tree(tuple(tokens), (-1, *parents))


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    scores = draw(st.lists(SCORES, min_size=1, max_size=12))
    return scores, [draw(st.integers(-1, i - 1)) for i in range(len(scores))]


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    steps, topk = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    most = 1 + topk + (steps - 1) * topk**2
    return TreeShape.chain(steps) if topk == 1 else TreeShape(steps, topk, draw(st.integers(2, most)))


@st.composite
def statics(draw: st.DrawFn) -> StaticTree:
    choices: list[Path] = []
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([(), *choices]))
        choices.append((*parent, draw(st.integers(0, 2))))
    return StaticTree(tuple(draw(st.permutations(sorted(set(choices))))))


def walk_up(tree: Tree, node: int) -> list[int]:
    return [] if node < 0 else [*walk_up(tree, tree.parents[node]), node]


# ---- shapes


@pytest.mark.parametrize("trio", [(5, 1, 6), (1, 2, 2), (1, 2, 3), (3, 2, 11), (5, 4, 16)])
def test_consistent_trio_is_kept(trio: tuple[int, int, int]) -> None:
    shape = TreeShape(*trio)
    assert (shape.num_steps, shape.topk, shape.num_draft_tokens) == trio


@pytest.mark.parametrize(
    ("trio", "named"),
    [
        ((5, 1, 8), "num_draft_tokens 6, got 8"),
        ((5, 1, 5), "num_draft_tokens 6, got 5"),
        ((3, 2, 12), "num_draft_tokens is 12.*at most 11"),
        ((0, 2, 3), "num_steps is 0"),
        ((3, 0, 3), "topk is 0"),
        ((3, 2, 1), "num_draft_tokens is 1"),
        ((True, 2, 3), "num_steps is True"),
        ((3, 2.0, 3), "topk is 2.0"),
    ],
)
def test_inconsistent_trio_is_refused(trio: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ShapeError, match=named):
        TreeShape(*trio)


@given(shapes() | statics())
def test_spelling_reads_back(shape: Shape) -> None:
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text", ["", "chain", "chain:x", "chain:1,2", "dynamic:5,4", "tree:3", "static:", "chain:0", "static:1.0"]
)
def test_bad_spelling_is_refused(text: str) -> None:
    with pytest.raises(ShapeError):
        parse_shape(text)


def test_static_tree_derives_its_figures() -> None:
    shape = StaticTree(((0, 3), (1,), (0,), (0, 3, 0)))
    assert shape.choices == ((0,), (1,), (0, 3), (0, 3, 0))
    assert (shape.parents, shape.num_steps, shape.topk, shape.num_draft_tokens) == ((-1, 0, 0, 1, 3), 3, 4, 5)


@pytest.mark.parametrize("choices", [(), ((),), ((0,), ()), ((0, 1),), ((0,), (0,)), ((-1,),), ((True,),)])
def test_bad_static_tree_is_refused(choices: tuple[Path, ...]) -> None:
    with pytest.raises(ShapeError):
        StaticTree(choices)


# ---- the tree


@given(trees())
def test_derived_views_equal_walks_up(tree: Tree) -> None:
    for node in range(len(tree.tokens)):
        line = walk_up(tree, node)
        assert tree.depths[node] == len(line) - 1
        assert tree.ancestors[node].tolist() == line + [-1] * (tree.ancestors.shape[1] - len(line))
        assert tree.mask[node].nonzero()[:, 0].tolist() == line


@given(trees())
def test_paths_end_in_leaves_and_cover_the_tree(tree: Tree) -> None:
    leaves = [node for node in range(len(tree.tokens)) if node not in tree.parents]
    assert [list(path) for path in tree.paths] == [walk_up(tree, leaf) for leaf in leaves]
    assert set().union(*tree.paths) == set(range(len(tree.tokens)))


@given(trees(), st.integers(0, 6))
def test_cut_keeps_exactly_the_shallow_nodes(tree: Tree, depth: int) -> None:
    def lines(t: Tree) -> list[tuple[int, ...]]:
        return [tuple(t.tokens[u] for u in walk_up(t, v)) for v in range(len(t.tokens))]

    assert lines(tree.cut(depth)) == [line for line in lines(tree) if len(line) <= depth + 1]


@given(trees())
def test_chain_is_one_path_in_order(tree: Tree) -> None:
    assert tree.is_chain == (tree.paths == (tuple(range(len(tree.tokens))),))


def test_root_is_plain_decoding() -> None:
    tree = Tree.root(7)
    assert (tree.tokens, tree.ancestors.tolist(), tree.is_chain, tree.cut(0)) == ((7,), [[0]], True, tree)


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, 0, 3, 2), (-1, -1), (-1,) * 3])
def test_parents_must_come_first(parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Tree((0,) * len(parents), parents)


# ---- rerank


def clean(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def naive_rerank(scores: list[float], parents: list[int], count: int) -> list[int]:
    def capped(i: int) -> float:
        return math.inf if i < 0 else min(clean(scores[i]), capped(parents[i]))

    return sorted(sorted(range(len(scores)), key=lambda i: (-capped(i), i))[:count])


def is_closed(chosen: list[int], parents: list[int]) -> bool:
    return all(parents[i] < 0 or parents[i] in chosen for i in chosen)


@settings(max_examples=100)
@given(pools(), st.integers(0, 12))
def test_rerank_equals_the_naive_one_and_is_closed(pool: tuple[list[float], list[int]], count: int) -> None:
    scores, parents = pool
    count = min(count, len(scores))
    chosen = rerank(torch.tensor([scores]), torch.tensor([parents]), count)[0].tolist()
    assert chosen == naive_rerank(scores, parents, count)
    assert is_closed(chosen, parents)


@given(st.lists(pools(), min_size=2, max_size=4), st.integers(1, 12))
def test_rerank_of_a_batch_is_each_alone(batch: list[tuple[list[float], list[int]]], count: int) -> None:
    size = min(len(scores) for scores, _ in batch)
    scores = torch.tensor([s[:size] for s, _ in batch])
    parents = torch.tensor([p[:size] for _, p in batch])
    before = scores.clone(), parents.clone()
    together = rerank(scores, parents, min(count, size))
    alone = [rerank(scores[i : i + 1], parents[i : i + 1], min(count, size)) for i in range(len(batch))]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(before[0].nan_to_num(7), scores.nan_to_num(7)) and torch.equal(before[1], parents)


def test_strict_scores_alone_do_not_close() -> None:
    """Negative control: a plain top-n keeps a child without its parent once a NaN occurs above it."""
    scores, parents = torch.tensor([[math.nan, -1.0, 0.0]]), torch.tensor([[-1, 0, 1]])
    assert not is_closed(scores.nan_to_num(-9).topk(2).indices[0].tolist(), [-1, 0, 1])
    assert is_closed(rerank(scores, parents, 2)[0].tolist(), [-1, 0, 1])


@given(st.integers(1, 5), st.data())
def test_rerank_maximises_the_expected_accepted_length(count: int, data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.floats(0.05, 1.0), min_size=count, max_size=8))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(shares))]
    mass: list[float] = []
    for share, parent in zip(shares, parents, strict=True):
        mass.append(share * (mass[parent] if parent >= 0 else 1.0))
    subsets = itertools.combinations(range(len(shares)), count)
    best = max(sum(mass[i] for i in subset) for subset in subsets if is_closed(list(subset), parents))
    chosen = rerank(torch.tensor([mass], dtype=torch.float64).log(), torch.tensor([parents]), count)[0].tolist()
    assert sum(mass[i] for i in chosen) == pytest.approx(best)


# ---- growth

Rows = Callable[[Path], list[float]]


def drafter(seed: int) -> Rows:
    """A model of one line: for each path a permutation of ROW, the same in every run."""

    def row(path: Path) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
        return [ROW[i] for i in torch.randperm(VOCAB, generator=generator).tolist()]

    return row


def grow(shape: Shape, models: list[Rows]) -> list[Tree]:
    """The drafting loop without a model: one model per sequence, node paths kept on the host."""
    pool = Pool.empty(len(models))
    frontier, paths = pool.roots, [[()] for _ in models]
    for step in range(shape.num_steps):
        logprobs = torch.tensor([[model(path) for path in row] for model, row in zip(models, paths, strict=True)])
        ids = top_children(logprobs, shape.topk)
        pool = pool.expand(frontier, ids, logprobs.gather(2, ids))
        if step + 1 < shape.num_steps:
            frontier = shape.frontier(pool)
            paths = [
                [row[s] + (t,) for s, t in steps] for row, steps in zip(paths, steps_down(pool, frontier), strict=True)
            ]
    return pool.trees([9] * len(models), shape.chosen(pool))


def steps_down(pool: Pool, frontier: Tensor) -> list[list[tuple[int, int]]]:
    """(slot of the parent in the frontier before, token) for each new frontier node."""
    return torch.stack([pool.slots(frontier), pool.tokens.gather(1, frontier)], -1).tolist()


def children(model: Rows, path: Path, score: float, topk: int) -> list[tuple[Path, float]]:
    row = [clean(value) for value in model(path)]
    best = sorted(range(VOCAB), key=lambda token: -row[token])[:topk]
    return [((*path, token), min(score, score + row[token])) for token in best]


def naive_paths(shape: TreeShape, model: Rows) -> list[Path]:
    """EAGLE-2 in plain Python: the chosen nodes as token paths, in pool order."""
    pool: list[tuple[Path, float]] = []
    frontier: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(shape.num_steps):
        new = [child for path, score in frontier for child in children(model, path, score, shape.topk)]
        pool += new
        best = sorted(range(len(new)), key=lambda i: (-new[i][1], i))[: shape.topk]
        frontier = [new[i] for i in sorted(best)]
    best = sorted(range(len(pool)), key=lambda i: (-pool[i][1], i))[: shape.num_draft_tokens - 1]
    return [pool[i][0] for i in sorted(best) if pool[i][1] > -math.inf]


def token_paths(tree: Tree) -> list[Path]:
    return [tuple(tree.tokens[v] for v in line[1:]) for line in tree.lineages[1:]]


@settings(max_examples=100)
@given(shapes(), st.integers(0, 10**6))
def test_dynamic_growth_equals_the_naive_builder(shape: TreeShape, seed: int) -> None:
    assert token_paths(grow(shape, [drafter(seed)])[0]) == naive_paths(shape, drafter(seed))


@given(shapes() | statics(), st.lists(st.integers(0, 99), min_size=2, max_size=4))
def test_growth_of_a_batch_is_each_alone(shape: Shape, seeds: list[int]) -> None:
    models = [drafter(seed) for seed in seeds]
    assert grow(shape, models) == [grow(shape, [model])[0] for model in models]


@given(statics(), st.integers(0, 99))
def test_static_growth_follows_the_ranks(shape: StaticTree, seed: int) -> None:
    def spelled(choice: Path) -> Path:
        path: Path = ()
        for rank in choice:
            path = children(drafter(seed), path, 0.0, VOCAB)[rank][0]
        return path

    tree = grow(shape, [drafter(seed)])[0]
    assert token_paths(tree) == [spelled(choice) for choice in shape.choices]
    assert tree.parents == shape.parents


def test_impossible_children_are_left_out() -> None:
    pool = Pool.empty(1)
    logprobs = torch.tensor([[[-0.5, -math.inf, math.nan]]])
    pool = pool.expand(pool.roots, torch.tensor([[[4, 5, 6]]]), logprobs)
    assert pool.trees([9], rerank(pool.scores, pool.parents, 3)) == [Tree((9, 4), (-1, 0))]


@given(st.lists(SCORES, min_size=12, max_size=12))
def test_pool_scores_never_rise_and_are_never_nan(values: list[float]) -> None:
    pool = Pool.empty(1)
    ids = torch.zeros(1, 1, 3, dtype=torch.long)
    pool = pool.expand(pool.roots, ids, torch.tensor(values[:3]).view(1, 1, 3))
    pool = pool.expand(torch.tensor([[0, 1, 2]]), ids.expand(1, 3, 3), torch.tensor(values[3:]).view(1, 3, 3))
    parent = pool.scores[0, pool.parents[0, 3:]]
    assert not pool.scores.isnan().any() and (pool.scores[0, 3:] <= parent).all()


def test_empty_shapes_of_growth_are_programming_errors() -> None:
    with pytest.raises(AssertionError, match="from a pool of 1"):
        rerank(torch.zeros(1, 1), torch.full((1, 1), -1), 2)
