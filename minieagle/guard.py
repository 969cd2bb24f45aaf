"""What a template sees of a caller's text: all of it, but unable to become a control token.

The one idea: of every control token's name one character is replaced, wherever a caller's text has it, by an
unguessable number, and the number by the character again after the control tokens were found. So "<|im_end|>" in a
message, a tool's name or a call's arguments survives a template's trimming, joining and JSON as text, and as nothing
else.

Text that must be seen is also wrapped in two numbers. A template that leaves it out, or cuts it short, lacks one.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

# Digits alone: no filter that changes the case, escapes or trims alters them. Kind and value follow the secret part.
_DIGITS: Final = 20
_START, _END, _CHAR = "1", "2", "3"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A text that the rendered whole must show: its marked form, where the caller wrote it and what it is. Of those
    with one `either`, one is enough."""

    marked: str
    where: str
    what: str
    verbatim: bool
    either: str


class Guard:
    """The replacements of one rendering. `shown` adds to what `missing` looks for."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        self._secret = f"{secrets.randbelow(10**_DIGITS):0{_DIGITS}d}"
        self._marks = re.compile(f"{self._secret}([123])([0-9]{{7}})")
        self._replaced = {ord(char): self._mark(_CHAR, ord(char)) for char in map(_telling, control_tokens)}
        self._shown: list[Shown] = []

    def text(self, text: str) -> str:
        """`text` with no control token's name in it."""
        return text.translate(self._replaced)

    def shown(self, text: str, where: str, what: str, *, verbatim: bool = False, either: str = "") -> str:
        """The same, to be found in the rendered whole: both its ends or, if `verbatim`, all of it and without quotes
        around. White space at its ends stays outside of the marks, for templates to trim; white space alone need not be
        shown."""
        core = text.strip()
        if not core:
            return text
        before, after = text.split(core, 1)
        number = len(self._shown)
        marked = f"{self._mark(_START, number)}{self.text(core)}{self._mark(_END, number)}"
        self._shown.append(Shown(marked=marked, where=where, what=what, verbatim=verbatim, either=either))
        return f"{before}{marked}{after}"

    def data(self, value: Any) -> Any:
        """JSON `value` with `text` applied to every string in it, keys too."""
        if isinstance(value, dict):
            return {self.text(key): self.data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def missing(self, rendered: str) -> Shown | None:
        """The first text that `rendered` does not show; None when all are there."""
        marks = {(mark[1], int(mark[2])) for mark in self._marks.finditer(rendered)}
        whole = [{(_START, number), (_END, number)} <= marks for number in range(len(self._shown))]
        for number, shown in enumerate(self._shown):
            if shown.verbatim and (shown.marked not in rendered or f'"{shown.marked}"' in rendered):
                whole[number] = False
        enough = {shown.either for shown, seen in zip(self._shown, whole, strict=True) if seen} - {""}
        unseen = (shown for shown, seen in zip(self._shown, whole, strict=True) if not seen)
        return next((shown for shown in unseen if shown.either not in enough), None)

    def clear(self, rendered: str) -> str:
        """`rendered` with the caller's characters back and the wrapping gone."""
        return self._marks.sub(self._cleared, rendered)

    def _cleared(self, mark: re.Match[str]) -> str:
        """A character that was replaced; none for a number that a template made up of the one it saw."""
        char = int(mark[2])
        return chr(char) if mark[1] == _CHAR and char in self._replaced else ""

    def _mark(self, kind: str, number: int) -> str:
        return f"{self._secret}{kind}{number:07d}"


def _telling(name: str) -> str:
    """The character of a control token's name that is replaced: no letter or digit, if it has another."""
    return next((char for char in name if not char.isalnum()), name[0])
