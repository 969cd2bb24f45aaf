"""An engine without a model: it says the prompt back, two tokens a step. It stands in for the real one in HTTP tests.

`python tests/fake_engine.py` serves it on a free port, for the tests that need a process to send signals to.
"""

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import minieagle
from minieagle import server
from minieagle.engine import Output, Request, TokenLogprob
from minieagle.errors import RequestError
from minieagle.sequence import SpecStats
from minieagle.tokenizer import Detokenizer, Tokenizer

TARGET = Path(minieagle.__file__).parent / "assets" / "target"
MAX_CONTEXT_TOKENS = 2048


class FakeEngine:
    """Implements the seam of minieagle.engine.Engine. `ignore_eos` repeats the prompt until max_tokens.

    Notes the threads that touch it and the requests that were aborted; `fault` is raised by the next step; a prompt
    that holds FAILING fails alone.
    """

    FAILING = 4087

    def __init__(self, tokenizer: Tokenizer, *, step_s: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.max_context_tokens = MAX_CONTEXT_TOKENS
        self.fault: Exception | None = None
        self.threads: set[int] = set()
        self.added: list[Request] = []
        self.aborted: list[int] = []
        self.num_polls = 0
        self._running: dict[int, Iterator[Output]] = {}
        self._step_s = step_s

    @property
    def has_work(self) -> bool:
        self.num_polls += 1
        return bool(self._running)

    def add(self, request: Request) -> int:
        self.threads.add(threading.get_ident())
        if self.tokenizer.bos_id in request.prompt_ids[1:]:
            raise RequestError("prompt starts twice; remove the second start token", param="prompt")
        self.added.append(request)
        self._running[len(self.added)] = self._outputs(len(self.added), request)
        return len(self.added)

    def abort(self, request_id: int) -> None:
        self.threads.add(threading.get_ident())
        self.aborted.append(request_id)
        self._running.pop(request_id, None)

    def step(self) -> list[Output]:
        self.threads.add(threading.get_ident())
        time.sleep(self._step_s)
        if self.fault is not None:
            raise self.fault
        outputs = [next(stream) for stream in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        return outputs

    def _outputs(self, request_id: int, request: Request) -> Iterator[Output]:
        ids, finish_reason = self._script(request)
        text, pushed = Detokenizer(self.tokenizer), ""
        for start in range(0, len(ids), 2):
            new, is_last = ids[start : start + 2], start + 2 >= len(ids)
            if self.FAILING in new:
                yield Output(request_id, (), "", None, "error", "NaN in the logits", None)
            piece = "".join(map(text.push, new)) + (text.flush() if is_last else "")
            piece, stopped = _cut(pushed, piece, request.params.stop)
            pushed += piece
            reason = "stop" if stopped else finish_reason if is_last else None
            stats = _stats(request, num_steps=start // 2 + 1, num_tokens=start + len(new)) if reason else None
            yield Output(request_id, tuple(new), piece, self._logprobs(request, new), reason, None, stats)

    def _script(self, request: Request) -> tuple[list[int], str]:
        ids, limit = request.prompt_ids, request.params.max_tokens
        if request.params.ignore_eos:
            return list(itertools.islice(itertools.cycle(ids), limit)), "length"
        return list(ids[:limit]), "length" if len(ids) > limit else "stop"

    def _logprobs(self, request: Request, ids: list[int]) -> tuple[TokenLogprob, ...] | None:
        num = request.params.logprobs
        if num is None:
            return None
        return tuple(TokenLogprob(i, -0.5, tuple((k, -1.0 - k) for k in range(num - 1)) + ((9, -1e30),)) for i in ids)


def _stats(request: Request, *, num_steps: int, num_tokens: int) -> SpecStats:
    """As if a chain of two drafted tokens had its first accepted in every full step."""
    return SpecStats(num_steps, num_tokens, 2 * num_steps * request.spec, [num_tokens - num_steps, 0])


def _cut(pushed: str, piece: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """`piece` cut before the first stop string; what was already pushed can't be taken back by this simple engine."""
    found = [at for at in ((pushed + piece).find(stop) for stop in stops) if at >= 0]
    return (piece[: max(min(found) - len(pushed), 0)], True) if found else (piece, False)


if __name__ == "__main__":
    fake = FakeEngine(Tokenizer(TARGET), step_s=0.02)
    sys.exit(server.run(fake, port=0, drain_s=float(sys.argv[1])))  # type: ignore[arg-type]
