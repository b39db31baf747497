"""Text to token ids, so that only a template makes control tokens and joined pieces gain no spaces.

Ids are made once per piece and concatenated, never made from joined text. Three things of a
Hugging Face tokenizer stand against that, and each is switched off on private copies:

* control tokens are recognised anywhere in a text (``encode_text`` keeps them plain);
* a post-processor adds BOS or EOS to every call (``bos_ids`` says what belongs at the very start);
* sentencepiece-like tokenizers put a space before every text (only the first piece gets it here).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Self

from tokenizers import Tokenizer

from pc_rag.errors import ModelError
from pc_rag.model.conversation import check_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    from pc_rag.types import TokenIds

_PROBE = "a"
"""Text that shows what a post-processor adds around any text."""


@dataclass(frozen=True, slots=True)
class LocatedTokens:
    """Tokens of a text, and where they stand in it.

    Attributes:
        token_ids: The tokens.
        places: For each the first of its characters and the one behind its last. Tokens that are
            bytes of one character all have its place.
    """

    token_ids: TokenIds
    places: tuple[tuple[int, int], ...]


class TextTokenizer:
    """A fast Hugging Face tokenizer behind the three calls that prompt caching needs.

    The wrapped tokenizer is not modified. Every method may be called from any thread.

    Args:
        tokenizer: A fast tokenizer (one with a ``tokenizers`` backend).
        eos_ids: Further ids that end a generation, such as those of a generation config.
        chat_template: Jinja source that takes the place of the tokenizer's own templates.

    Attributes:
        bos_ids: The ids the tokenizer itself puts before a plain text; empty if it puts none.
        control_ids: Ids of control tokens: no text makes them, only a template does.
        reserved_ids: Those of them that no text makes even by what its characters are: without the
            token for unknown text.
        unknown_id: What the vocabulary gives for text that it cannot write; ``None`` where it can
            write every byte, whatever token the tokenizer names as unknown then.
        eos_ids: Every id that ends a generation.
        chat_template: Jinja source of the chat template; ``None`` without one.
        tool_template: The one for conversations with tools: some models bring two.
        special_texts: Texts of tokens that ``decode`` leaves out, the longest first.
        digest: Hex SHA-256 over vocabulary, rules, special tokens and chat templates.

    Raises:
        ModelError: A Python ("slow") tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self._hf = tokenizer
        self.chat_template = chat_template or _template_of(tokenizer, "default")
        own_tool_template = None if chat_template else _template_of(tokenizer, "tool_use")
        self.tool_template = own_tool_template or self.chat_template
        self._template = _private_copy(tokenizer)
        source = self._template.to_str()
        templates = tuple(dict.fromkeys((self.chat_template or "", self.tool_template or "")))
        self.digest = _digest_of(source, templates)
        spec = json.loads(source)
        self.control_ids = frozenset(_find_control_ids(spec, "\0".join(templates)))
        self.special_texts = _special_texts(spec)
        self._control_texts = _ControlTexts.of(spec, self.control_ids)
        self.reserved_ids = self.control_ids - {getattr(tokenizer, "unk_token_id", None)}
        self.unknown_id = _find_unknown_id(spec["model"], self._template)
        is_changed = _make_special(spec, self.control_ids)
        self._text = _plain_text_encoder(json.dumps(spec) if is_changed else source)
        self._continuation = self._text
        self._has_dummy_prefix = _drop_dummy_prefix(spec)
        if self._has_dummy_prefix:
            self._continuation = _plain_text_encoder(json.dumps(spec))
        self.bos_ids = self._find_bos_ids()
        own_eos = getattr(tokenizer, "eos_token_id", None)
        self.eos_ids = frozenset(eos_ids) | ({own_eos} if own_eos is not None else set())

    @property
    def backend(self) -> Tokenizer:
        """A private ``tokenizers.Tokenizer``, for ``DecodeStream``. Not to be modified."""
        return self._template

    @property
    def hf_tokenizer(self) -> PreTrainedTokenizerBase:
        """The wrapped tokenizer, for rendering its chat template. Not to be modified."""
        return self._hf

    def encode_text(self, text: str, *, is_first: bool = False) -> TokenIds:
        """Token ids of plain text: control tokens in it stay text, and no BOS or EOS is added.

        Args:
            text: Any text.
            is_first: The text stands at the very start of the prompt. Only there a tokenizer of
                the sentencepiece kind puts the space it puts before every text.

        Raises:
            PromptError: It is no text, or holds half of a surrogate pair.
        """
        encodings = self._encode_plain(text, is_first=is_first)
        return tuple(chain.from_iterable(encoding.ids for _, encoding in encodings))

    def locate_text(self, text: str, *, is_first: bool = False) -> LocatedTokens:
        """The tokens of ``encode_text``, and the characters that each was made of."""
        token_ids: list[int] = []
        places: list[tuple[int, int]] = []
        for start, encoding in self._encode_plain(text, is_first=is_first):
            token_ids += encoding.ids
            places += ((start + begin, start + end) for begin, end in encoding.offsets)
        return LocatedTokens(tuple(token_ids), tuple(places))

    def encode_template(self, text: str, *, is_first: bool = False) -> TokenIds:
        """Token ids of template text: control tokens are parsed, and no BOS or EOS is added.

        Args:
            text: Text of a chat template.
            is_first: As for ``encode_text``.
        """
        encoding = self._template.encode(text, add_special_tokens=False)
        if is_first or not self._has_dummy_prefix:
            return tuple(encoding.ids)
        # The space before the text goes; what follows a control token is as the tokenizer has it.
        for index, token_id in enumerate(encoding.ids):
            if token_id in self.control_ids:
                leading = text[: encoding.offsets[index][0]]
                return self.encode_text(leading) + tuple(encoding.ids[index:])
        return self.encode_text(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, control tokens left out. Incomplete characters become U+FFFD."""
        return self._template.decode(list(token_ids), skip_special_tokens=True)

    def imitates_control(self, text: str) -> bool:
        """Whether a text holds what reads as a control token, or what may become one at its ends.

        Such a text must not stand in what ``encode_template`` gets.
        """
        if self._control_texts.are_in(text):
            return True
        if self._template.normalizer is None:
            return False
        ids = self._template.encode(text, add_special_tokens=False).ids
        return not self.reserved_ids.isdisjoint(ids)

    def _encode_plain(
        self, text: str, *, is_first: bool, start: int = 0
    ) -> Iterator[tuple[int, Encoding]]:
        """Encodings of the pieces of a text, with where each piece starts; ``start`` is the first.

        One piece, but for a vocabulary that holds control tokens as ordinary pieces (Unigram): such
        a text is cut inside what makes one.
        """
        encoder = self._text if is_first else self._continuation
        try:
            encoding = encoder.encode(text, add_special_tokens=False)
        except TypeError:
            check_text(text, "text of a prompt")  # the reason is nearly always in the text
            raise
        cuts = (
            []
            if self.reserved_ids.isdisjoint(encoding.ids)
            else [
                begin + 1
                for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
                if token_id in self.reserved_ids and end - begin > 1  # one character is not cut
            ]
        )
        if not cuts:
            yield start, encoding
            return
        for begin, end in pairwise([0, *cuts, len(text)]):
            piece_is_first = is_first and not begin
            yield from self._encode_plain(
                text[begin:end], is_first=piece_is_first, start=start + begin
            )

    def _find_bos_ids(self) -> TokenIds:
        plain = self._template.encode(_PROBE, add_special_tokens=False).ids
        full = self._template.encode(_PROBE, add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()


def _private_copy(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The tokenizer's backend, without truncation and padding that callers may have left in it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not getattr(tokenizer, "is_fast", False) or not isinstance(backend, Tokenizer):
        raise ModelError(
            f"tokenizer {type(tokenizer).__name__} is implemented in Python; pc-rag needs a fast "
            f"tokenizer (a tokenizer.json beside the model). Convert it, for example with "
            f"AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(folder), and load "
            f"that folder"
        )
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _digest_of(source: str, templates: Sequence[str]) -> str:
    digest = hashlib.sha256(source.encode())
    for template in templates:
        digest.update(b"\0template\0")
        digest.update(template.encode())
    return digest.hexdigest()


def _template_of(tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several named templates
        template = template.get(name)
    return template or None


def _special_texts(spec: dict[str, Any]) -> tuple[str, ...]:
    texts = [token["content"] for token in spec.get("added_tokens", ()) if token["special"]]
    return tuple(sorted(filter(None, texts), key=len, reverse=True))


@dataclass(frozen=True, slots=True)
class _ControlTexts:
    """Texts of control tokens, whole and in part.

    A part counts at the ends of a text only, where text beside it may complete it, and only if it
    holds more than letters and digits.
    """

    whole: re.Pattern[str]
    heads: frozenset[str]
    tails: frozenset[str]
    max_chars: int

    @classmethod
    def of(cls, spec: dict[str, Any], control_ids: frozenset[int]) -> Self:
        tokens = spec.get("added_tokens", ())
        whole = {token["content"] for token in tokens if token["id"] in control_ids} - {""}
        heads = {text[:end] for text in whole for end in range(1, len(text))}
        tails = {text[start:] for text in whole for start in range(1, len(text))}
        return cls(
            re.compile("|".join(map(re.escape, sorted(whole))) or r"(?!)"),
            frozenset(head for head in heads if not head.isalnum()),
            frozenset(tail for tail in tails if not tail.isalnum()),
            max(map(len, whole), default=0),
        )

    def are_in(self, text: str) -> bool:
        if self.whole.search(text):
            return True
        lengths = range(1, min(self.max_chars, len(text) + 1))
        return any(text[:n] in self.tails or text[-n:] in self.heads for n in lengths)


def _find_control_ids(spec: dict[str, Any], chat_template: str) -> set[int]:
    """Ids of what a template may write and no text may.

    These are the special tokens, and those added tokens without the flag that the chat template
    names (``<think>``). Other added tokens are text: runs of spaces, for example.
    """
    control_ids: set[int] = set()
    for token in spec.get("added_tokens", ()):
        content = token["content"]
        named = content.strip() != "" and content in chat_template
        if token["special"] or named:
            control_ids.add(token["id"])
    return control_ids


def _find_unknown_id(vocabulary: dict[str, Any], tokenizer: Tokenizer) -> int | None:
    """Unigram vocabularies tell the id, all others the text."""
    text = vocabulary.get("unk_token")
    unknown_id: int | None = vocabulary.get("unk_id")
    return unknown_id if text is None else tokenizer.token_to_id(text)


def _make_special(spec: dict[str, Any], control_ids: frozenset[int]) -> bool:
    """Flag every control token in a tokenizer's JSON as special; whether one was not."""
    plain = [
        token
        for token in spec.get("added_tokens", ())
        if token["id"] in control_ids and not token["special"]
    ]
    for token in plain:
        token["special"] = True
    return bool(plain)


def _plain_text_encoder(source: str) -> Tokenizer:
    """A tokenizer that recognises no special token.

    It has no post-processor: that adds nothing here, and may trim spaces off the places of tokens.
    """
    encoder = Tokenizer.from_str(json.dumps(json.loads(source) | {"post_processor": None}))
    encoder.encode_special_tokens = True
    return encoder


def _drop_dummy_prefix(spec: dict[str, Any]) -> bool:
    """Remove from a tokenizer's JSON whatever puts a space before a text; whether any did."""
    changed = False
    for part in ("normalizer", "pre_tokenizer"):
        if spec.get(part):
            spec[part], part_changed = _without_dummy_prefix(spec[part])
            changed = changed or part_changed
    return changed


def _without_dummy_prefix(step: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    kind = step["type"]
    if kind == "Sequence":
        name = "normalizers" if "normalizers" in step else "pretokenizers"
        results = [_without_dummy_prefix(child) for child in step[name]]
        children = [child for child, _ in results if child is not None]
        return {**step, name: children}, any(changed for _, changed in results)
    if kind == "Prepend":
        return None, True
    if kind == "Metaspace" and step.get("prepend_scheme") != "never":
        return {**step, "prepend_scheme": "never"}, True
    if kind == "ByteLevel" and step.get("add_prefix_space"):
        return {**step, "add_prefix_space": False}, True
    return step, False
