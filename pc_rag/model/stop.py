"""Stop strings in streamed text, across token borders."""

from __future__ import annotations

from pc_rag.errors import ConfigError


class StopMatcher:
    """Releases streamed text up to the first stop string, and holds back only what may become one.

    The released text is always ``text[:start]``, where ``start`` is the smallest index at which
    any stop string occurs in the whole text fed. Where one stop string is complete while another
    that began earlier may still complete, the decision waits for more text or for ``flush``.
    Work is linear in the text, per stop string. Not for use by several threads at once.

    Args:
        stops: Stop strings; none means that all text passes.

    Raises:
        ConfigError: An empty stop string.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        if any(not stop for stop in stops):
            raise ConfigError(f"stop strings must not be empty; got {stops!r}")
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._held_start = 0
        self._position = 0
        self._match_start: int | None = None
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found: nothing more will be released."""
        return self._is_stopped

    def feed(self, text: str) -> str:
        """Take the next text and return what is safe to release.

        Args:
            text: Any text, also empty. Ignored after the stop.
        """
        if self._is_stopped:
            return ""
        if not self._patterns:
            return text
        self._held += text
        for character in text:
            self._position += 1
            self._advance(character)
            if self._is_stopped:
                break
        return self._release(self._safe_end())

    def flush(self) -> str:
        """Return what was held back, at the end of the text. A complete stop string still cuts."""
        if self._is_stopped:
            return ""
        self._is_stopped = self._match_start is not None
        end = self._position if self._match_start is None else self._match_start
        return self._release(end)

    def _advance(self, character: str) -> None:
        for pattern in self._patterns:
            if pattern.advance(character):
                start = self._position - len(pattern.text)
                if self._match_start is None or start < self._match_start:
                    self._match_start = start
        if self._match_start is not None:
            self._is_stopped = self._pending_start() >= self._match_start

    def _pending_start(self) -> int:
        """Where the earliest unfinished candidate begins; the end of the text without one."""
        return self._position - max(pattern.num_matched for pattern in self._patterns)

    def _safe_end(self) -> int:
        pending = self._pending_start()
        return pending if self._match_start is None else min(pending, self._match_start)

    def _release(self, end: int) -> str:
        size = end - self._held_start
        released, self._held = self._held[:size], self._held[size:]
        self._held_start = end
        return released


class _Pattern:
    """One stop string and how much of it the text so far ends with (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallbacks = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallbacks[length - 1]
            length += text[index] == text[length]
            self._fallbacks[index] = length

    def advance(self, character: str) -> bool:
        """Take one character; whether the string is now complete."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._fallbacks[self.num_matched - 1]
        self.num_matched += self.text[self.num_matched] == character
        if self.num_matched < len(self.text):
            return False
        self.num_matched = self._fallbacks[-1]
        return True
