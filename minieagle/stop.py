"""Stop strings on a text that comes in pieces: nothing is shown that may still turn out to be part of one."""

from __future__ import annotations


class StopStrings:
    """Mutable: `push` takes new text and returns what may be shown; `stopped` is set when a stop string is complete.
    At most the length of the longest stop string less one is held back."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if not self._strings:
            return text
        self._held += text
        found = [self._held.find(string) for string in self._strings if string in self._held]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max(self._overlap(string) for string in self._strings)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, string: str) -> int:
        """Length of the longest end of the held text that begins `string`."""
        longest = min(len(string) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(string[:n])), 0)
