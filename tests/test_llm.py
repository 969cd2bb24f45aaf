"""The Python API on the embedded model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

import minieagle
from minieagle import LLM, MinieagleError, ModelError, RequestError, SamplingParams
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


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("a", {"params": {"temperature": 1}}, "must be a SamplingParams"),
        ("a", {"spec": "no"}, "spec='no' must be True, False or None"),
        (b"hi", {}, "got bytes"),
        ("a", {"stop_token_ids": [10**6]}, "stop_token_ids holds 1000000, outside the vocabulary"),
        ("x" * 10**6, {}, "1000000 bytes of text are at least .* tokens"),
    ],
)
def test_requests_of_the_wrong_type_are_named(prompt: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm().generate(prompt, **options)


@pytest.mark.parametrize("messages", ["hi", b"hi", [], 5, [CHAT], ["hi"]])
def test_a_chat_is_a_list_of_messages(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages=.* must be a list of at least one"):
        llm().chat(messages)


def test_a_second_thread_is_told_while_the_first_one_s_requests_run() -> None:
    stream = llm().stream(CHAT, max_tokens=9)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(MinieagleError, match="another thread's requests run on this LLM"):
            pool.submit(llm().chat, CHAT, max_tokens=2).result()
        stream.close()
        assert pool.submit(llm().chat, CHAT, max_tokens=2).result().token_ids


def test_names_of_dtypes_are_dtypes() -> None:
    assert LLM(dtype="float32", device="cpu", spec=False).engine.target.dtype == torch.float32


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
        ({"page_sise": 4}, ModelError, "'page_sise' is no option: known are .*page_size"),
        ({"model": 5}, ModelError, "model=5 must be a path"),
        ({"drafter": 5}, ModelError, "drafter=5 must be a path"),
        ({"trace": 5}, ModelError, "trace=5 must be a path"),
        ({"tree": 5}, ModelError, "tree=5 must be text such as 'chain:5'"),
        ({"dtype": "float16"}, ModelError, "dtype='float16' must be 'bfloat16' or 'float32'"),
        ({"dtype": 5}, ModelError, "dtype=5 must be"),
        ({"device": "foo"}, ModelError, "device='foo' must be 'cpu'"),
        ({"device": "meta"}, ModelError, "device='meta' must be 'cpu'"),
        ({"device": "cuda:99"}, ModelError, "device='cuda:99' must be 'cpu'"),
        ({"boundaries": 5}, ModelError, r"boundaries=5 must be a list of integers"),
        ({"reduction_slices": "x"}, ModelError, "reduction_slices='x' must be an integer"),
        ({"spec": "no"}, ModelError, "spec='no' must be True or False"),
        ({"max_seqs": True}, ModelError, "max_seqs=True must be an integer"),
        ({"capture_convention": "x" * 999}, ModelError, "capture_convention='x{79} must be"),
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
    sizes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(**sizes)
