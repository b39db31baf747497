"""Token ids to text, as they are generated."""

from __future__ import annotations

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
    Not for use by several threads at once.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._emitted: list[str] = []
        self._is_resynchronising = False

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is now complete; often one word or nothing."""
        self._token_ids.append(token_id)
        if self._is_resynchronising:
            return self._emit(self._rest(hold_incomplete=True))
        try:
            text = self._stream.step(self._tokenizer.backend, token_id) or ""
        except Exception as error:
            if "prefix" not in str(error):
                raise
            # The stream's window no longer decodes to what it did: from here on decode the whole.
            self._is_resynchronising = True
            return self._emit(self._rest(hold_incomplete=True))
        return self._emit(text)

    def flush(self) -> str:
        """Return the text of ids still held back, at the end of a generation."""
        return self._emit(self._rest(hold_incomplete=False))

    def _rest(self, *, hold_incomplete: bool) -> str:
        text = self._tokenizer.decode(self._token_ids)
        if hold_incomplete:
            text = text.rstrip(_REPLACEMENT)
        emitted = "".join(self._emitted)
        return text.removeprefix(emitted) if text.startswith(emitted) else ""

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text
