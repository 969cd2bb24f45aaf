"""The command line: `minieagle COMMAND`. Each command is a few lines over the Python API; the options that the field
knows by other names have these as aliases."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from minieagle import conversion, diagnosis, evaluate, serve, sharding, survey, tracing
from minieagle.compare import Comparison, compare
from minieagle.dist.group import GroupError, from_environment
from minieagle.dist.job import job
from minieagle.dist.ranks import Ranks
from minieagle.dist.watch import HANG_TIMEOUT_S
from minieagle.llm import LLM, obey, set_threads
from minieagle.models.drafter_config import DrafterConfig
from minieagle.models.drafter_weights import check_fits
from minieagle.options import add_engine_options, engine_arguments
from minieagle.quantize import quantize_directory
from minieagle.sampling import SamplingParams
from minieagle.spec.fingerprint import tokenizer_fingerprint
from minieagle.spec.train import Report, TrainConfig, Trainer
from minieagle.streams import run_command
from minieagle.texts import Messages, check_settings, read_texts, sample_prompts, write_texts

console = Console(stderr=True)

OVER_RANKS = ("demo", "generate", "chat", "bench", "serve")

DEMO_PROMPTS = (
    "I would like to find a restaurant in San Jose.",
    "Can you find flights for me? I want to go to Seattle.",
    "I want to watch a movie tonight. What is playing nearby?",
    "Natalia has 12 apples and gives 5 to her friend. How many are left?",
    "How do I use tar?",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 not the promised result, 2 bad input, 130 interrupted, 141
    nobody reads the output any more."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        return serve.main(arguments[1:])
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return run_command(options.command, lambda: _over_ranks(options))


def _over_ranks(options: argparse.Namespace) -> int:
    """The command in this process, which may be one of several."""
    group = from_environment()
    if group.size > 1 and options.command not in OVER_RANKS:
        raise GroupError(f"{options.command} runs in one process; only {', '.join(OVER_RANKS)} run over several ranks")
    with job(group, hang_timeout_s=getattr(options, "hang_timeout", HANG_TIMEOUT_S)) as ranks:
        return _run(options, ranks)


def _run(options: argparse.Namespace, ranks: Ranks) -> int:
    """The command on rank 0; the other ranks do what it does."""
    options.ranks = ranks
    if ranks.leads:
        status: int = options.run(options)
        return status
    set_threads(options.threads, options.model)
    obey(ranks, device=ranks.device, **engine_arguments(options))
    return 0


class Command(Protocol):
    """A module that is a command of its own."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> int: ...


_MODULES: tuple[tuple[str, Command, str], ...] = (
    ("inspect", survey, "what a model directory holds and takes, without loading it"),
    ("doctor", diagnosis, "measure how a drafter is wired, and name what is wrong"),
    ("eval", evaluate, "a drafter's score over texts, from one pass of the target"),
    ("convert-drafter", conversion, "write a drafter for another engine, or read one from it"),
    ("shard", sharding, "cut a target's weights into files for each rank"),
    ("trace", tracing, "compare two traces"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minieagle", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    _demo_options(command("demo", _demo, "the same prompts without and with speculation, on the embedded model"))
    _generate_options(command("generate", _generate, "answer prompts, streaming the text"))
    _chat_options(command("chat", _chat, "talk to the model in the terminal"))
    _bench_options(command("bench", _bench, "compare plain and speculative decoding on prompts of your own"))
    _quantize_options(command("quantize", _quantize, "quantise a model's routed experts to INT4"))
    _train_options(command("train", _train, "train a drafter for a target on text that the target writes"))
    for name, module, summary in _MODULES:
        module.add_options(command(name, module.run, summary))
    commands.add_parser("serve", help="serve the OpenAI API (see `minieagle serve --help`)", add_help=False)
    return parser


def _sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="keep the k best tokens; 0 keeps all")
    add("--top-p", type=float, default=1.0, help="keep the fewest best tokens with this mass")
    add("--min-p", type=float, default=0.0, help="keep tokens with at least this share of the best")
    add("--seed", type=int, help="the same seed gives the same text, with or without speculation")
    add("--max-tokens", type=int, default=max_tokens, help="new tokens at most (default: %(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--ignore-eos", action="store_true", help="go on past the model's end token")


def _demo_options(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser)
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens at most (default: %(default)s)")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="user messages; none: read one from standard input"
    )
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--stats", action="store_true", help="print the speculation statistics of each answer")
    _sampling_options(parser, max_tokens=256)
    add_engine_options(parser)


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _sampling_options(parser, max_tokens=256)
    add_engine_options(parser)


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="user messages (default: those of the demo)")
    _sampling_options(parser, max_tokens=128)
    add_engine_options(parser)


def _quantize_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="a bf16 or fp32 model directory")
    parser.add_argument("target", type=Path, metavar="DST", help="a new directory")
    parser.add_argument("--group-size", type=int, default=32, help="input columns a scale (default: %(default)s)")


def _train_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "output", type=Path, metavar="DIR", help="where the drafter and its checkpoint go; an earlier run there resumes"
    )
    add(
        "--corpus",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="conversations (.txt or .xz) to take prompts from",
    )
    add("--model", "--model-path", metavar="DIR", help="directory of the target (default: the embedded model)")
    add(
        "--boundaries", type=int, nargs="+", metavar="B", help="target states to read, 0 .. number of layers (required)"
    )
    add("--num-prompts", type=int, default=4000, help="texts that the target writes first (default: %(default)s)")
    add("--new-tokens", type=int, default=256, help="tokens it writes for each (default: %(default)s)")
    add("--max-seqs", type=int, default=64, help="texts written at once (default: %(default)s)")
    add(
        "--draft-vocab-size",
        type=int,
        default=2048,
        help="most frequent tokens that may be drafted (default: %(default)s)",
    )
    add(
        "--intermediate-size", type=int, default=1024, help="width of the drafter's feed-forward (default: %(default)s)"
    )
    add("--num-heads", type=int, default=8, help="attention heads (default: %(default)s)")
    add("--num-kv-heads", type=int, default=2, help="key/value heads (default: %(default)s)")
    add("--num-steps", type=int, default=6, help="draft steps unrolled in training (default: %(default)s)")
    add("--num-updates", type=int, default=1600, help="updates in all (default: %(default)s)")
    add("--batch-tokens", type=int, default=2048, help="text positions an update (default: %(default)s)")
    add("--learning-rate", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of prompts, weights and order (default: %(default)s)")
    add("--norm-output", action="store_true", help="feed the normed state back (EAGLE-3.1)")
    add("--fc-norm", action="store_true", help="one norm per target state before they are fused (EAGLE-3.1)")


def _load(options: argparse.Namespace) -> LLM:
    set_threads(options.threads, options.model)
    with _loading() as progress:
        task = progress.add_task("loading", total=None)
        return LLM(
            **engine_arguments(options),
            ranks=options.ranks,
            device=options.ranks.device,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _load_both(options: argparse.Namespace) -> LLM:
    """For a command that compares decoding with and without speculation."""
    if options.no_spec:
        raise ValueError(f"--no-spec: {options.command} compares decoding with and without speculation; leave it out")
    return _load(options)


def _loading() -> Progress:
    return _bar(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())


def _counting() -> Progress:
    return _bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def _bar(*columns: ProgressColumn) -> Progress:
    """A bar that goes away at the end. Where nobody watches there is none: it would leave a line behind."""
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
    )


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _demo(options: argparse.Namespace) -> int:
    llm = _load_both(options)
    params = SamplingParams(max_tokens=options.max_tokens)
    pairs = []
    runs = compare(llm, [_user(text) for text in DEMO_PROMPTS], params, show=_show)
    for text in DEMO_PROMPTS:
        console.print(f"[bold]> {text}[/bold]")
        pairs.append(next(runs))
        _show("\n\n")
    return _report(Comparison(tuple(pairs)))


def _bench(options: argparse.Namespace) -> int:
    llm = _load_both(options)
    prompts = [_user(text) for text in options.prompts or DEMO_PROMPTS]
    with _counting() as progress:
        pairs = tuple(
            progress.track(compare(llm, prompts, _params(options)), total=len(prompts), description="prompts")
        )
    return _report(Comparison(pairs))


def _report(comparison: Comparison) -> int:
    Console().print(comparison.table())
    return 0 if comparison.num_same == len(comparison.pairs) else 1


def _generate(options: argparse.Namespace) -> int:
    llm = _load(options)
    for text in options.prompts or [sys.stdin.read()]:
        stats = None
        for output in llm.stream(text if options.raw else _user(text), _params(options)):
            _show(output.text)
            stats = output.stats or stats
            if output.error is not None:
                raise ValueError(output.error)
        _show("\n")
        if options.stats and stats is not None:
            depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_depth)
            console.print(f"{stats.tokens_per_step:.2f} tokens per step; acceptance by depth {depths or '-'}")
    return 0


def _chat(options: argparse.Namespace) -> int:
    llm = _load(options)
    start = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(start)
    console.print("/reset begins anew, /exit or Ctrl-D ends", style="dim")
    while True:
        try:
            text = console.input("[bold]> [/bold]")
        except EOFError:
            return 0
        if text.strip() == "/exit":
            return 0
        if text.strip() == "/reset":
            messages = list(start)
        elif text.strip():
            _answer(llm, messages, text, _params(options))


def _answer(llm: LLM, messages: list[dict[str, str]], text: str, params: SamplingParams) -> None:
    """Stream one answer and keep both turns; what can't be answered is said and forgotten."""
    turn = [*messages, *_user(text)]
    pieces: list[str] = []
    try:
        for output in llm.stream(turn, params):
            pieces.append(output.text)
            _show(output.text)
    except ValueError as error:
        console.print(str(error), style="red")
        return
    except KeyboardInterrupt:
        pass  # Ctrl-C ends the answer, not the conversation
    _show("\n")
    messages[:] = [*turn, {"role": "assistant", "content": "".join(pieces)}]


def _quantize(options: argparse.Namespace) -> int:
    with _counting() as progress:
        task = progress.add_task("files", total=None)
        quantize_directory(
            options.source,
            options.target,
            group_size=options.group_size,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    return 0


def _train(options: argparse.Namespace) -> int:
    """All that can be refused is, before hours of writing texts."""
    _check_train(options)
    prompts = sample_prompts(options.corpus, options.num_prompts, options.seed)
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} conversations are too few to train on: one is kept for scoring")
    llm = LLM(options.model, spec=False, max_seqs=options.max_seqs)
    drafter, training = _drafter_config(options, llm), _train_config(options)
    check_fits(drafter, llm.engine.target.config)
    texts = _texts(options, llm, prompts)
    tokenizer = tokenizer_fingerprint(llm.tokenizer.directory)
    trainer = Trainer(llm.engine.target, texts, drafter, training, options.output, tokenizer=tokenizer)
    with _counting() as progress:
        task = progress.add_task("updates", total=options.num_updates, completed=trainer.update)
        trainer.run(lambda report: _train_report(progress, task, report))
    console.print(f"drafter written to {options.output}")
    return 0


def _check_train(options: argparse.Namespace) -> None:
    """What needs neither corpus nor target to be refused."""
    if not options.boundaries:
        raise ValueError("--boundaries is needed: name the target states the drafter reads, such as --boundaries 2 5 7")
    for name in ("num_prompts", "new_tokens", "num_heads", "num_kv_heads"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    _train_config(options)
    if (options.output / "config.json").exists() and not _texts_path(options).exists():
        raise ValueError(f"{options.output} holds another model, which training would replace: pass a new directory")


def _texts_path(options: argparse.Namespace) -> Path:
    path: Path = options.output / "training" / "texts.jsonl"
    return path


def _texts(options: argparse.Namespace, llm: LLM, prompts: list[Messages]) -> list[tuple[int, ...]]:
    """The texts that the target writes, or wrote before it was interrupted."""
    path, room = _texts_path(options), llm.engine.max_context_tokens
    if options.new_tokens >= room:
        raise ValueError(f"--new-tokens {options.new_tokens} must be below {room}, the target's context")
    settings = {name: getattr(options, name) for name in ("num_prompts", "new_tokens", "seed")}
    check_settings(path.with_name("texts.json"), settings | {"corpus": [file.name for file in options.corpus]})
    if len(prompts) < options.num_prompts:
        console.print(f"only {len(prompts)} conversations for --num-prompts {options.num_prompts}", highlight=False)
    with _counting() as progress:
        task = progress.add_task("texts", total=len(prompts))
        write_texts(
            llm.engine,
            prompts,
            path,
            new_tokens=options.new_tokens,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    texts = read_texts(path)
    if len(texts) < len(prompts):
        left_out = len(prompts) - len(texts)
        console.print(f"{left_out} prompts left out: with --new-tokens they exceed the context of {room} tokens")
    return [text.tokens for text in texts]


def _drafter_config(options: argparse.Namespace, llm: LLM) -> DrafterConfig:
    config = llm.engine.target.config
    return DrafterConfig(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=options.intermediate_size,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        head_dim=config.hidden_size // options.num_heads,
        vocab_size=config.vocab_size,
        draft_vocab_size=options.draft_vocab_size,
        boundaries=tuple(options.boundaries),
        max_position_embeddings=config.max_position_embeddings,
        norm_output=options.norm_output,
        fc_norm=options.fc_norm,
    )


def _train_config(options: argparse.Namespace) -> TrainConfig:
    return TrainConfig(
        num_steps=options.num_steps,
        batch_tokens=options.batch_tokens,
        num_updates=options.num_updates,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )


def _train_report(progress: Progress, task: object, report: Report) -> None:
    progress.update(task, completed=report.update, description=f"loss {report.loss:.3f}")  # type: ignore[arg-type]
    if report.score is not None:
        rates = " ".join(f"{rate:.3f}" for rate in report.score.rates)
        progress.console.print(f"update {report.update}: held-out agreement by step {rates}")


if __name__ == "__main__":
    raise SystemExit(main())
