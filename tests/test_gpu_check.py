"""bench/gpu_check.py without a GPU: it says so; and its checks, made on the CPU, pass and find planted faults."""

from dataclasses import replace

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import check_experts, check_graphs, check_greedy, check_logits, check_speculation, findings
from bench.runs import Run
from minieagle.models.deepseek import Target
from minieagle.models.target_weights import load_target
from minieagle.sequence import SpecStats
from tests import embedded
from tests.test_graphs import Recorder

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_all_checks_pass_where_the_cpu_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "NUM_PROMPTS", 2)
    monkeypatch.setattr(gpu_check, "check_graphs", lambda *a: check_graphs(*a, record=Recorder()))
    found = {finding.name: finding.passed for finding in findings(CPU, 12)}
    assert found.pop("INT4 experts") is None and found.pop("flashinfer") is None
    assert len(found) == 9 and all(found.values())


@torch.inference_mode()
def test_a_wrong_target_is_found() -> None:
    wrong = load_target(embedded.embedded("target"))
    wrong.norm.weight.mul_(1.1)
    assert check_logits(wrong, embedded.prompt(0)).passed is False


def test_another_text_is_found_unless_it_was_a_near_tie() -> None:
    engine, prompt = embedded.engine(), embedded.prompt(0)
    tokens = tuple(embedded.tokens(embedded.run(engine, [embedded.Request(prompt, embedded.params(max_tokens=6))])[0]))
    run = Run(tokens, 0.0, 0.0, SpecStats())
    other = replace(run, token_ids=(*tokens[:3], (tokens[3] + 1) % 4096, *tokens[4:]))
    assert check_greedy(embedded.target(), run, run, prompt).passed
    assert check_greedy(embedded.target(), other, run, prompt).passed is False


def test_speculation_that_changes_a_logprob_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of trees come out one bit larger than those of chains."""
    forward = Target.forward

    def off(target: Target, rows: object, *arguments: object, **options: object) -> object:
        out = forward(target, rows, *arguments, **options)  # type: ignore[arg-type]
        wide = any(span.ancestors is not None for span in rows.spans)  # type: ignore[attr-defined]
        return replace(out, logits=out.logits * (1 + 2.0**-22)) if wide else out

    engine = embedded.engine("dynamic:4,4,16")
    monkeypatch.setattr(Target, "forward", off)
    found = list(check_speculation(engine, [embedded.prompt(0)], 12))
    assert not all(finding.passed for finding in found)


def test_experts_that_are_not_grouped_are_not_called_right() -> None:
    assert check_experts(embedded.target()).passed is None
