"""The Python API on the embedded model."""

from __future__ import annotations

from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import minieagle
from minieagle import LLM, ModelError, RequestError, SamplingParams
from minieagle.spec.tree import ShapeError
from tests.embedded import MESSAGES

CHAT = [{"role": "user", "content": MESSAGES[0]}]


@cache
def llm() -> LLM:
    return LLM(tree="dynamic:4,3,8")


def test_generate_takes_every_form_of_prompt() -> None:
    text = llm().generate("User: Hello", max_tokens=5)
    ids = llm().generate(llm().tokenizer.encode("User: Hello"), max_tokens=5)
    assert text.token_ids == ids.token_ids
    assert llm().generate(CHAT, max_tokens=5).token_ids == llm().chat(CHAT, max_tokens=5).token_ids
    both = llm().generate(["User: Hello", CHAT], max_tokens=5)
    assert [r.token_ids for r in both] == [text.token_ids, llm().chat(CHAT, max_tokens=5).token_ids]


def test_module_level_generate_is_the_embedded_model() -> None:
    with_spec = minieagle.generate([CHAT], max_tokens=20)[0]
    without = minieagle.generate([CHAT], spec=False, max_tokens=20)[0]
    assert with_spec.token_ids == without.token_ids and with_spec.text
    assert with_spec.stats.num_steps < without.stats.num_steps


def test_stream_is_generate_in_pieces() -> None:
    pieces = list(llm().stream(CHAT, max_tokens=30, logprobs=2))
    whole = llm().chat(CHAT, max_tokens=30, logprobs=2)
    assert "".join(p.text for p in pieces) == whole.text
    assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids)
    assert all(len(entry.top) == 2 for entry in whole.logprobs)


def test_an_abandoned_stream_frees_its_pages() -> None:
    stream = llm().stream(CHAT, max_tokens=30)
    next(stream)
    stream.close()
    pool = llm().engine.scheduler.pool
    assert pool.num_free == pool.num_pages


def test_interleaved_streams_lose_nothing() -> None:
    wanted = [llm().generate(prompt, max_tokens=12).text for prompt in ("User: Hello", CHAT)]
    first, second = llm().stream("User: Hello", max_tokens=12), llm().stream(CHAT, max_tokens=12)
    texts = ["", ""]
    for one, other in zip_longest(first, second):
        texts[0] += one.text if one else ""
        texts[1] += other.text if other else ""
    assert texts == wanted
    assert llm().generate([]) == []


def test_a_bad_prompt_costs_only_itself() -> None:
    good, empty, long, last = llm().generate([CHAT, "", "word " * 3000, CHAT], max_tokens=8)
    assert good.token_ids == last.token_ids and good.error is None
    assert (empty.finish_reason, long.finish_reason) == ("error", "error")
    assert "empty" in str(empty.error) and "2048" in str(long.error)
    with pytest.raises(RequestError, match="empty"):
        llm().generate("")


def test_an_item_of_the_wrong_type_costs_only_itself() -> None:
    wrong: Any = [CHAT, None, 5]
    good, none, number = llm().generate(wrong, max_tokens=4)
    assert good.error is None and "NoneType" in str(none.error) and "int" in str(number.error)
    assert not llm().engine.has_work


def test_same_seed_same_text_at_any_temperature() -> None:
    one = llm().chat(CHAT, temperature=1.0, seed=3, max_tokens=30)
    assert one.token_ids == llm().chat(CHAT, temperature=1.0, seed=3, max_tokens=30, spec=False).token_ids
    assert one.token_ids != llm().chat(CHAT, temperature=1.0, seed=4, max_tokens=30).token_ids


@pytest.mark.parametrize(("wrong", "words"), [({"temprature": 1}, "temprature"), ({"temperature": -1}, "temperature")])
def test_bad_options_are_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm().generate("a", **wrong)


def test_params_and_fields_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="not both"):
        llm().generate("a", SamplingParams(), temperature=0.5)


def test_speculation_without_a_drafter_is_refused() -> None:
    plain = LLM(spec=False)
    assert plain.chat(CHAT, max_tokens=3).stats.num_steps == 2
    with pytest.raises(RequestError, match="drafter"):
        plain.chat(CHAT, spec=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_steps": 5}, ShapeError, "num_draft_tokens"),
        ({"num_steps": 5, "topk": 1, "num_draft_tokens": 8}, ShapeError, "6"),
        ({"tree": "chain:0"}, ShapeError, "num_steps"),
        ({"tree": "chain:3", "num_steps": 3, "topk": 1, "num_draft_tokens": 4}, ShapeError, "one way"),
        ({"tree": "chain:3", "spec": False}, ModelError, "drafter"),
        ({"tree": "dynamic:1,3000,50"}, ShapeError, "2048"),
        ({"tree": "chain:100000"}, ShapeError, "32"),
        ({"max_context_tokens": 4096}, ValueError, "2048"),
        ({"page_sise": 4}, TypeError, "page_sise"),
    ],
)
def test_bad_load_options_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(**options)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer.json"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_seqs": 10**12}, r"takes \d+ bytes .* are free"),
        ({"max_seqs": 10**23}, r"takes \d+ bytes"),
        ({"cache_tokens": 10**15}, r"takes \d+ bytes"),
        ({"page_size": 10**12}, "page_size=1000000000000 is beyond the context of 2048"),
        ({"max_context_tokens": 10**9}, "beyond the model's 2048"),
    ],
)
def test_sizes_that_no_machine_has_are_refused_before_loading_or_with_their_bytes(
    sizes: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(**sizes)
