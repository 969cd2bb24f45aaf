"""Speculation is invisible in law: the exact distribution of the text, and for a seed the text itself.

A toy target gives a distribution for every prefix over a vocabulary of at most 8. `outcomes` drives a walk through
every outcome of the draws that it looks at, each weighted by its probability, so nothing is sampled and the law of the
emitted text is exact. It must equal ancestral sampling's to 1e-9, and verifiers with a known bias must not.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minieagle.sampling import SamplingBatch, SamplingParams, emit, processed_logprobs
from minieagle.spec.accept import accept
from minieagle.spec.tree import Pool, Tree, TreeShape, top_children

Text = tuple[int, ...]
Law = dict[Text, float]
Target = Callable[[Text], tuple[float, ...]]  # prefix -> probability of each next token
Drafter = Callable[[Text], Tree]  # prefix -> the tree of a round; its root carries the prefix's last token
Family = Callable[[int, int, Text], Tree]  # seed, vocabulary size, prefix -> tree
Walk = Callable[[Tree, Sequence[int]], Text]  # a verifier: tree, the token drawn at each node -> the emitted tokens
Verifier = Callable[[Target, Drafter, Text], Law]  # the law of one round's emitted tokens

SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 2, 3, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.6]),
    min_p=st.sampled_from([0.0, 0.1, 0.4]),
)
VOCABS, SEEDS = st.integers(2, 8), st.integers(0, 10**6)


def generator(seed: int, text: Text) -> torch.Generator:
    return torch.Generator().manual_seed(hash((seed, *text)) % 2**31)


def logits_of(seed: int, vocab: int, text: Text) -> Tensor:
    return torch.randn(1, vocab, generator=generator(seed, text)) * 2


def target_of(seed: int, vocab: int, params: SamplingParams) -> Target:
    batch = SamplingBatch.of([(params, 0)])
    filters = batch.temperature, batch.top_k, batch.top_p, batch.min_p

    @cache
    def target(text: Text) -> tuple[float, ...]:
        law = processed_logprobs(logits_of(seed, vocab, text), *filters)[0].double().exp()
        return tuple((law / law.sum()).tolist())

    return target


# ---- drafters: chains, random trees with duplicates, dynamic trees


def chain_drafter(seed: int, vocab: int, text: Text) -> Tree:
    tokens = torch.randint(vocab, (3,), generator=generator(seed, text)).tolist()
    return Tree((-1, *tokens), (-1, 0, 1, 2))


def random_drafter(seed: int, vocab: int, text: Text) -> Tree:
    rng = generator(seed, text)
    size = int(torch.randint(1, 8, (), generator=rng))
    parents = [int(torch.randint(node, (), generator=rng)) for node in range(1, size)]
    return Tree((-1, *torch.randint(vocab, (size - 1,), generator=rng).tolist()), (-1, *parents))


def dynamic_drafter(seed: int, vocab: int, text: Text) -> Tree:
    shape = TreeShape(3, 2, 6)
    pool = Pool.empty(1)
    frontier, paths = pool.roots, [text]
    for _ in range(shape.num_steps):
        logprobs = torch.stack([logits_of(seed, vocab, path).log_softmax(-1)[0] for path in paths])[None]
        ids = top_children(logprobs, 2)
        pool = pool.expand(frontier, ids, logprobs.gather(2, ids))
        frontier = shape.frontier(pool)
        tokens = pool.tokens.gather(1, frontier)[0].tolist()
        paths = [(*paths[s], token) for s, token in zip(pool.slots(frontier)[0].tolist(), tokens, strict=True)]
    return pool.trees([-1], shape.chosen(pool))[0]


DRAFTERS = st.sampled_from([chain_drafter, random_drafter, dynamic_drafter])


# ---- laws


class Undrawn(Exception):
    """A walk looked at a node whose token is not drawn yet."""


class Draws(Sequence[int]):
    """The tokens drawn so far; looking at another one asks for it."""

    def __init__(self, drawn: dict[int, int], size: int) -> None:
        self.drawn, self.size = drawn, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, node: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if node not in self.drawn:
            raise Undrawn(node)
        return self.drawn[node]


def node_text(tree: Tree, node: int, text: Text) -> Text:
    return text + tuple(tree.tokens[v] for v in tree.lineages[node][1:])


def outcomes(walk: Walk, tree: Tree, law_at: Callable[[int], Sequence[float]]) -> Iterator[tuple[Text, float]]:
    """Every outcome of the walk with its probability, each draw replaced by its distribution."""
    pending: list[tuple[dict[int, int], float]] = [({}, 1.0)]
    while pending:
        drawn, weight = pending.pop()
        try:
            yield walk(tree, Draws(drawn, len(tree.tokens))), weight
        except Undrawn as at:
            node = at.args[0]
            pending += [(drawn | {node: x}, weight * p) for x, p in enumerate(law_at(node)) if p > 0]


def verify(walk: Walk, target: Target, drafter: Drafter, text: Text) -> Law:
    """One round: draw at a node from the target's law of that node's own path."""
    tree, law = drafter(text), defaultdict[Text, float](float)
    for emitted, weight in outcomes(walk, tree, lambda node: target(node_text(tree, node, text))):
        law[emitted] += weight
    return law


def text_law(verifier: Verifier, target: Target, drafter: Drafter, length: int, text: Text = ()) -> Law:
    """The law of the first `length` tokens over as many rounds as they take; the last round's surplus is cut."""
    if len(text) >= length:
        return {text[:length]: 1.0}
    law = defaultdict[Text, float](float)
    for emitted, weight in verifier(target, drafter, text).items():
        for whole, p in text_law(verifier, target, drafter, length, text + emitted).items():
            law[whole] += weight * p
    return law


def ancestral(target: Target, vocab: int, length: int) -> Law:
    texts = product(range(vocab), repeat=length)
    return {text: math.prod(target(text[:i])[x] for i, x in enumerate(text)) for text in texts}


def distance(law: Law, other: Law) -> float:
    return max(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in law.keys() | other.keys())


# ---- verifiers


def engine(tree: Tree, emitted: Sequence[int]) -> Text:
    return accept(tree, emitted).tokens


def lenient(tree: Tree, emitted: Sequence[int]) -> Text:
    """Biased: takes the first child whenever the drawn token has none."""
    node, tokens = 0, []
    while children := [v for v, parent in enumerate(tree.parents) if parent == node]:
        node = next((v for v in children if tree.tokens[v] == emitted[node]), children[0])
        tokens.append(tree.tokens[node])
    return (*tokens, emitted[node])


def stale(tree: Tree, emitted: Sequence[int]) -> Text:
    """Biased: takes the bonus token from the row of the last accepted node's parent."""
    path = accept(tree, emitted).path
    return tuple(emitted[node] for node in (*path[:-1], path[-2] if len(path) > 1 else 0))


def ratio(target: Target, drafter: Drafter, text: Text) -> Law:
    """Biased: min(1, p/q) with uniform q, as if a deterministic draft were sampled from q. Sees first children only."""
    tree, law = drafter(text), defaultdict[Text, float](float)
    node, weight, emitted = 0, 1.0, ()
    while True:
        p = target(text + emitted)
        child = next((v for v, parent in enumerate(tree.parents) if parent == node), None)
        taken = 0.0 if child is None else min(1.0, p[tree.tokens[child]] * len(p))
        residual = p if child is None else [max(x - 1 / len(p), 0.0) for x in p]
        for x, mass in enumerate(residual):
            law[(*emitted, x)] += weight * (1 - taken) * mass / (sum(residual) or 1.0)
        if child is None:
            return law
        node, weight, emitted = child, weight * taken, (*emitted, tree.tokens[child])


# ---- the tests


@settings(max_examples=60)
@given(SEEDS, VOCABS, SETTINGS, DRAFTERS)
def test_text_has_the_targets_law(seed: int, vocab: int, params: SamplingParams, drafter: Family) -> None:
    target, length = target_of(seed, vocab, params), 3 if vocab > 4 else 4
    law = text_law(partial(verify, engine), target, partial(drafter, seed + 1, vocab), length)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert distance(law, ancestral(target, vocab, length)) < 1e-9


@pytest.mark.parametrize("verifier", [partial(verify, lenient), partial(verify, stale), ratio], ids=str)
@pytest.mark.parametrize("drafter", [chain_drafter, dynamic_drafter])
def test_biased_verifiers_fail_the_same_test(verifier: Verifier, drafter: Family) -> None:
    target = target_of(3, 4, SamplingParams(temperature=1.0))
    law = text_law(verifier, target, partial(drafter, 4, 4), 3)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)  # a law, but another one
    assert distance(law, ancestral(target, 4, 3)) > 1e-3


@settings(max_examples=40)
@given(SEEDS, VOCABS, SETTINGS, DRAFTERS)
def test_expected_tokens_are_one_plus_the_mass_of_the_nodes(
    seed: int, vocab: int, params: SamplingParams, drafter
) -> None:
    """tau = 1 + the sum over distinct drafted paths of their probability: why rerank keeps the most probable nodes."""
    target, tree = target_of(seed, vocab, params), drafter(seed + 1, vocab, ())
    reached = {node_text(tree, node, ()) for node in range(1, len(tree.tokens)) if is_first_copy(tree, node)}
    mass = sum(math.prod(target(path[:i])[x] for i, x in enumerate(path)) for path in reached)
    law = verify(engine, target, lambda _: tree, ())
    assert sum(len(tokens) * p for tokens, p in law.items()) == pytest.approx(1 + mass, abs=1e-9)


def is_first_copy(tree: Tree, node: int) -> bool:
    """Whether neither the node nor an ancestor repeats an earlier sibling: the walk never enters such a copy."""
    siblings = [(tree.parents[v], tree.tokens[v]) for v in range(len(tree.tokens))]
    return all(siblings.index(siblings[v]) == v for v in tree.lineages[node])


@settings(max_examples=60)
@given(SEEDS, VOCABS, st.one_of(SETTINGS, st.just(SamplingParams())), DRAFTERS)
def test_a_seed_gives_the_same_text_with_any_drafter(
    seed: int, vocab: int, params: SamplingParams, drafter: Family
) -> None:
    def decode(draft: Drafter) -> Text:
        text: Text = ()
        while len(text) < 12:
            tree = draft(text)
            texts = [node_text(tree, node, text) for node in range(len(tree.tokens))]
            rows = torch.cat([logits_of(seed, vocab, t) for t in texts])
            batch = SamplingBatch.of([(params, seed)] * len(texts))
            emitted = emit(rows, batch, torch.tensor([len(t) for t in texts])).tolist()
            text += accept(tree, emitted).tokens
        return text[:12]

    assert decode(partial(drafter, seed + 1, vocab)) == decode(lambda text: Tree.root(-1))
