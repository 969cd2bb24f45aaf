"""The law of what the whole engine emits, on a model small enough to know it exactly: chi-square against transformers'
probabilities, with a drafter that is right now and then, and a biased acceptance as negative control."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from minieagle.engine import Engine, EngineConfig, Request
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.drafter_weights import load_drafter
from minieagle.models.target_weights import load_target
from minieagle.sampling import SamplingParams
from minieagle.spec.accept import Accepted, accept
from minieagle.spec.train import new_drafter, save_drafter
from minieagle.spec.tree import Tree, parse_shape
from minieagle.tokenizer import Tokenizer
from tests.embedded import run, tokens
from tests.oracles import Oracle, save_target

VOCAB, PROMPT, NUM_TEXTS = 6, (1, 4, 2), 3000


class NoText:
    """What an engine needs of a tokenizer when only ids matter."""

    stop_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_target(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.1)
    config = DrafterConfig(
        hidden_size=64,
        target_hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB - 1,
        boundaries=(0, 1, 2),
        max_position_embeddings=64,
    )
    save_drafter(new_drafter(config, load_target(path), torch.arange(VOCAB - 1), seed=0), path / "drafter")
    return path


def engine(directory: Path, tree: str) -> Engine:
    target = load_target(directory)
    drafter = load_drafter(directory / "drafter", target, dtype=torch.float32)
    config = EngineConfig(shape=parse_shape(tree), max_seqs=50, max_context_tokens=16)
    return Engine(target, cast(Tokenizer, NoText()), drafter=drafter, config=config)


def exact_law(directory: Path, temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of each text of three tokens behind the prompt."""
    oracle, law = Oracle(directory), {}
    for pair in itertools.product(range(VOCAB), repeat=2):
        probabilities = (oracle.run((*PROMPT, *pair)).logits.double() / temperature).softmax(-1)
        head = float(probabilities[-3, pair[0]] * probabilities[-2, pair[1]])
        law |= {(*pair, last): head * float(probabilities[-1, last]) for last in range(VOCAB)}
    return law


def drawn(running: Engine, temperature: float) -> Counter[tuple[int, ...]]:
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=3) for seed in range(NUM_TEXTS)]
    return Counter(tuple(tokens(outputs)) for outputs in run(running, [Request(PROMPT, p) for p in params]))


def chi_square(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; texts expected fewer than 5 times share a cell."""
    rare = [text for text, p in law.items() if p * NUM_TEXTS < 5]
    cells = [(counts[text], p * NUM_TEXTS) for text, p in law.items() if text not in set(rare)]
    cells.append((sum(counts[text] for text in rare), sum(law[text] for text in rare) * NUM_TEXTS + 1e-9))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1


def is_plausible(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> bool:
    """Within five standard deviations of what chi-square has by chance (its variance is twice its freedom)."""
    statistic, freedom = chi_square(counts, law)
    return statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("tree", ["chain:2", "dynamic:2,3,7"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_law_of_the_emitted_text(directory: Path, tree: str, temperature: float) -> None:
    running = engine(directory, tree)
    counts = drawn(running, temperature)
    assert counts.total() == NUM_TEXTS
    assert is_plausible(counts, exact_law(directory, temperature))


def _eager(tree: Tree, emitted: Sequence[int]) -> Accepted:
    """Takes the first child of the root every fourth token, drawn or not."""
    children = [node for node, parent in enumerate(tree.parents) if parent == 0]
    wanted = list(emitted)
    if children and emitted[0] % 4 == 0:
        wanted[0] = tree.tokens[children[0]]
    return accept(tree, wanted)


def test_negative_control_a_biased_acceptance(directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("minieagle.engine.accept", _eager)
    assert not is_plausible(drawn(engine(directory, "dynamic:2,3,7"), 1.0), exact_law(directory, 1.0))
