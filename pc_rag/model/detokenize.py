"""Token ids to text, as they are generated."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from pc_rag.model.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns generated ids into text piece by piece.

    The joined pieces equal ``tokenizer.decode`` of all ids pushed, which is what
    ``generate`` followed by ``decode`` of the new tokens gives: the stream is not seeded with the
    prompt, so a tokenizer that drops the space of a text's first word drops it here too. A
    character whose bytes come in several tokens is held back until it is complete; bytes that
    never become one appear as U+FFFD as soon as a complete character follows, or at ``flush``.

    One exception: tokenizers with byte fallback decode a run of byte tokens to U+FFFD as a whole
    once a later byte of the run is wrong. Characters of such a run that were already released stay.
    Not for use by several threads at once.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._is_stream_usable = True
        self._window: list[int] = []
        self._emitted: list[str] = []

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is now complete; often one word or nothing."""
        self._window.append(token_id)
        if not self._is_stream_usable:
            return self._resynchronise()
        try:
            text = self._stream.step(self._tokenizer.backend, token_id) or ""
        except Exception as error:  # the binding raises bare Exception
            if "prefix" not in str(error):
                raise
            self._is_stream_usable = False  # what it released is not how the ids decode now
            return self._resynchronise()
        self._emitted.append(text)
        return text

    def flush(self) -> str:
        """Return the text of ids still held back, at the end of a generation."""
        text = self._rest()
        self._emitted.append(text)
        return text

    def _resynchronise(self) -> str:
        """Release what is complete without the stream; start another behind a whole character."""
        text = self._rest().rstrip(_REPLACEMENT)
        self._emitted.append(text)
        last = self._tokenizer.decode(self._window[-1:])
        if text and last and _REPLACEMENT not in last:
            self._stream = DecodeStream(skip_special_tokens=True)
            self._stream.step(self._tokenizer.backend, self._window[-1])
            self._is_stream_usable = True
            self._window = self._window[-1:]
            self._emitted = [last]
        return text

    def _rest(self) -> str:
        """Text of the window's ids behind what was released."""
        text = self._tokenizer.decode(self._window)
        emitted = "".join(self._emitted)
        if text.startswith(emitted):
            return text[len(emitted) :]
        # emitted:  common | characters of a run of bytes
        # text:     common | one U+FFFD for each byte of the whole run | rest
        common = takewhile(lambda pair: pair[0] == pair[1], zip(text, emitted, strict=False))
        start = sum(1 for _ in common)
        for _ in emitted[start:].encode():
            if text[start : start + 1] != _REPLACEMENT:
                break
            start += 1
        return text[start:]
