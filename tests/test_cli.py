"""The commands, run as a user runs them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from minieagle.cli import main
from minieagle.models.drafter_weights import load_drafter
from tests import embedded
from tests.embedded import MESSAGES

# A file of conversations that is always there.
CORPUS = str(Path(__file__).with_name("corpus.txt"))


def test_generate_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", MESSAGES[0], "--max-tokens", "20", "--stats"]) == 0
    spec = capsys.readouterr()
    assert main(["generate", MESSAGES[0], "--max-tokens", "20", "--no-spec"]) == 0
    assert spec.out == capsys.readouterr().out and spec.out.strip()
    assert "tokens per step" in spec.err


def test_generate_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(MESSAGES[0]))
    assert main(["generate", "--max-tokens", "5", "--tree", "dynamic:3,2,6"]) == 0
    assert capsys.readouterr().out.strip()


def test_chat_answers_resets_and_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter([MESSAGES[0], "And in Oakland?", "", "/reset", "Hi!", "/exit"])
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: next(lines))
    assert main(["chat", "--max-tokens", "10"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line.strip()]) >= 3


def test_demo_and_bench_show_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-tokens", "12"]) == 0
    assert "5 of 5" in capsys.readouterr().out
    assert main(["bench", MESSAGES[0], "--max-tokens", "12", "--temperature", "0.7", "--seed", "1"]) == 0
    assert "1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "a", "--model", "no/such"], "no/such"),
        (["generate", "a", "--num-steps", "3"], "num_draft_tokens"),
        (["generate", "a", "--temperature", "nan"], "temperature"),
        (["generate", ""], "empty"),
        (["quantize", "no/such", "x"], "no/such"),
        (["train", "x", "--corpus", "no/such"], "--boundaries"),
        (["train", "x", "--corpus", "no/such", "--boundaries", "2"], "the corpus no/such can't be read"),
        (["train", "x", "--corpus", "no/such", "--boundaries", "2", "--num-heads", "0"], "--num-heads 0"),
        (["train", "x", "--corpus", CORPUS, "--boundaries", "2", "--num-prompts", "1"], "1 conversations are too few"),
        (["train", "x", "--corpus", CORPUS, "--boundaries", "2", "--new-tokens", "2048"], "--new-tokens 2048 must be"),
        (["train", "x", "--corpus", "no/such", "--boundaries", "2", "--learning-rate", "0"], "learning_rate"),
    ],
)
def test_bad_input_exits_2_and_names_it(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, *(["--raw"] if arguments == ["generate", ""] else [])]) == 2
    said = capsys.readouterr().err
    assert words in said and said == said.strip() + "\n", "no bar, no blank line"
    assert not Path("x").exists()


def test_a_missing_directory_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "a", "--model"], ["quantize"]):
        main([*command, "no/such", *(["x"] if command == ["quantize"] else [])])
        assert "no/such" in (said := capsys.readouterr().err) and ".json" not in said


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["generate", "a", "--temprature", "1"])
    assert exit_status.value.code == 2


def test_train_writes_a_drafter_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.txt"
    turns = "\n<|endoftext|>\n".join(f"User: {text}\nAssistant: Yes." for text in (MESSAGES * 3)[:9])
    corpus.write_text(turns + "\n")
    output = tmp_path / "drafter"
    small = ["--num-prompts", "10", "--new-tokens", "16", "--draft-vocab-size", "200", "--intermediate-size", "64"]
    command = ["train", str(output), "--corpus", str(corpus), "--boundaries", "2", "5", "8", *small, "--num-steps", "2"]
    assert main([*command, "--num-updates", "2", "--batch-tokens", "256"]) == 0
    assert main([*command, "--num-updates", "4", "--batch-tokens", "256"]) == 0
    said = capsys.readouterr().err
    assert "held-out agreement" in said and "only 9 conversations for --num-prompts 10" in said
    assert main([*command, "--num-updates", "4", "--batch-tokens", "256", "--new-tokens", "17"]) == 2
    assert "written with new_tokens=16, now 17" in capsys.readouterr().err
    assert load_drafter(output, embedded.target()).config.boundaries == (2, 5, 8)
