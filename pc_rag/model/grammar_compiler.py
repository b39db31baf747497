"""Grammars to masks over a model's vocabulary, by llguidance.

llguidance takes the bytes of every token from the tokenizer's JSON, and where a grammar leaves only
one way on it forces the tokens that the tokenizer makes of that text. Two things in that JSON are
changed on a copy, so that this is what ``TextTokenizer`` promises:

* control tokens get names that no text holds: ``"<|im_end|>"`` in an answer is plain text, and no
  control token is generated where a grammar asks for text;
* a Metaspace decoder becomes the replacement it stands for, the only form llguidance reads.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from pc_rag.errors import ConfigError, GenerationError, UnsupportedModelError, require
from pc_rag.model.grammar import GrammarKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.model.grammar import Grammar
    from pc_rag.model.tokenizer import TextTokenizer

_CAPACITY = 64
"""Compiled grammars that are kept, about a megabyte each."""

_CONTROL = "\U0010ffff"
"""Starts the name of a control token: a noncharacter, so no text holds it."""

_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""What chat templates' ``tojson`` writes; with free whitespace small models write nothing else."""

_NUM_CHARACTERS_SHOWN = 300

_ECHO = re.compile(r"<non-verbose/>|\n\s*\d+ \| ")
"""Where a message of llguidance starts to repeat what it was given."""


class GrammarMatcher:
    """Follows one answer through a grammar. Not for use by several threads at once.

    Args:
        matcher: llguidance's matcher, at the start; owned.
        tokenizer: The model's tokenizer, for messages.
        vocab_size: Number of ids of the tokenizer.
        grammar: What is followed, for messages.
    """

    def __init__(
        self,
        matcher: Any,  # noqa: ANN401 - llguidance is optional
        tokenizer: TextTokenizer,
        *,
        vocab_size: int,
        grammar: Grammar,
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammar = grammar
        self._token_ids: list[int] = []

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but its end can follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores with minus infinity at every token that the grammar forbids here.

        Ids beyond the tokenizer's, with which models pad their vocabulary, are forbidden. An
        end-of-sequence token is allowed where the grammar is complete.

        Args:
            scores: ``[..., vocab_size]``, any float dtype. Not modified.

        Raises:
            GenerationError: The vocabulary has no token that the grammar could go on with, or a
                limit of llguidance is reached.
        """
        bias = self._matcher.compute_logit_bias()
        self._check("cannot go on")
        num_tokens = min(self._vocab_size, scores.shape[-1])
        is_allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        bias = torch.frombuffer(bytearray(bias), dtype=torch.uint8)[:num_tokens]
        is_allowed[: bias.numel()] = bias != 0
        if not is_allowed.any():
            raise self._stuck("no token of the vocabulary fits")
        return scores.masked_fill(~is_allowed.to(scores.device), float("-inf"))

    def advance(self, token_id: int) -> None:
        """Take the chosen token.

        Raises:
            GenerationError: The grammar forbids it: its text needs a character that the
                vocabulary lacks, or a limit of llguidance is reached.
        """
        self._matcher.consume_token(token_id)
        self._check(f"cannot take token {token_id}")
        self._token_ids.append(token_id)

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise self._stuck(f"{what}: {_first_of(self._matcher.get_error())}")

    def _stuck(self, reason: str) -> GenerationError:
        text = self._tokenizer.decode(self._token_ids)[-_NUM_CHARACTERS_SHOWN:]
        return GenerationError(
            f"the {self._grammar} cannot go on after {len(self._token_ids)} tokens, behind "
            f"{text!r}, with this model's vocabulary of {self._vocab_size} tokens: {reason}. Allow "
            "text that the model's tokenizer can write, or simplify the grammar"
        )


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest. Thread-safe.

    Costs nothing until the first grammar comes; then llguidance is imported, and the tokenizer's
    vocabulary is read once.

    Args:
        tokenizer: The model's tokenizer.
        capacity: Most compiled grammars to keep.
    """

    def __init__(self, tokenizer: TextTokenizer, *, capacity: int = _CAPACITY) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._lock = threading.Lock()  # held within a call only, never across one
        self._ll_tokenizer: Any = None
        self._vocab_size = 0
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def start(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of a grammar, compiled now unless it is kept.

        Raises:
            MissingDependencyError: llguidance is not installed.
            UnsupportedModelError: llguidance cannot read the model's tokenizer.
            ConfigError: llguidance refuses the grammar, or its prefix or suffix ends the answer.
        """
        guidance = require("llguidance", feature="a grammar for answers", extra="structured")
        with self._lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer, self._vocab_size = _read_tokenizer(guidance, self._tokenizer)
            compiled = self._compiled.get(grammar)
        if compiled is None:  # compiled outside the lock: a large grammar takes long
            compiled = self._compile(guidance, grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
            matcher = compiled.deep_copy()
        return GrammarMatcher(
            matcher, self._tokenizer, vocab_size=self._vocab_size, grammar=grammar
        )

    def _compile(self, guidance: Any, grammar: Grammar) -> Any:  # noqa: ANN401
        source = _lark_source(guidance, grammar, self._tokenizer)
        limits = guidance.LLParserLimits(verbose_errors=False)
        compiled = guidance.LLMatcher(self._ll_tokenizer, source, log_level=0, limits=limits)
        if compiled.is_error():
            raise ConfigError(
                f"the {grammar} is refused: {_first_of(compiled.get_error())}. Change what the "
                "message names; llguidance's documentation lists the syntax that it supports"
            )
        first = compiled.deep_copy()
        first.compute_logit_bias()
        if first.is_error():
            raise ConfigError(
                f"the {grammar} allows no answer to begin: {_first_of(first.get_error())}. Look "
                "for a reference that leads to itself, and for text that the model's tokenizer "
                "cannot write"
            )
        return compiled


def _first_of(message: str) -> str:
    """A message of llguidance on one line, without the source that follows it."""
    return " ".join(_ECHO.split(message, maxsplit=1)[0].split())[:_NUM_CHARACTERS_SHOWN]


# -- grammars to llguidance's Lark --------------------------------------------------------------


def _lark_source(guidance: Any, grammar: Grammar, tokenizer: TextTokenizer) -> str:  # noqa: ANN401
    if grammar.kind is GrammarKind.LARK:
        return str(guidance.LLMatcher.grammar_from_lark(grammar.source))
    if grammar.kind is GrammarKind.REGEX:
        return str(guidance.LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind is GrammarKind.CHOICE:
        return "start: " + " | ".join(_literal(option) for option in json.loads(grammar.source))
    schema = {"x-guidance": _WHITESPACE} | json.loads(grammar.source)
    parts = [
        *_template_parts(grammar, grammar.prefix, tokenizer),
        f"%json {json.dumps(schema)}",
        *_template_parts(grammar, grammar.suffix, tokenizer),
    ]
    return "start: " + " ".join(parts)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\x7f")  # its lexer refuses DEL


def _template_parts(grammar: Grammar, text: str, tokenizer: TextTokenizer) -> Iterator[str]:
    """Template text as Lark: its control tokens by id, the text between them as literals."""
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    start = 0
    for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if token_id not in tokenizer.control_ids:
            continue
        if token_id in tokenizer.eos_ids:
            raise ConfigError(
                f"{text[begin:end]!r} in the prefix or suffix of the {grammar} ends an answer; "
                "leave it out: an answer ends by itself where its grammar is complete"
            )
        if begin > start:
            yield _literal(text[start:begin])
        yield f"<[{token_id}]>"
        start = end
    if start < len(text):
        yield _literal(text[start:])


# -- tokenizers to llguidance's -----------------------------------------------------------------


def _read_tokenizer(guidance: Any, tokenizer: TextTokenizer) -> tuple[Any, int]:  # noqa: ANN401
    """What llguidance makes of the tokenizer, and the number of ids that are real."""
    vocab_size = max(tokenizer.backend.get_vocab().values()) + 1
    eos_ids = sorted(token_id for token_id in tokenizer.eos_ids if token_id < vocab_size)
    try:
        ll_tokenizer = guidance.LLTokenizer(
            _spec_of(tokenizer, end_id=None if eos_ids else vocab_size),
            eos_token=eos_ids or [vocab_size],
        )
    except ValueError as error:
        raise UnsupportedModelError(
            f"llguidance cannot read the model's tokenizer: {_first_of(str(error))}. Grammars need "
            "a byte-level tokenizer or one with byte fallback; generate without a grammar",
            capability="constrained generation",
        ) from error
    return ll_tokenizer, vocab_size


def _spec_of(tokenizer: TextTokenizer, *, end_id: int | None = None) -> str:
    """The tokenizer's JSON, with the changes that the module describes.

    Args:
        tokenizer: The model's tokenizer. Not modified.
        end_id: Id of an end-of-sequence token to add, where the tokenizer has none: llguidance
            needs one, and no model generates it.
    """
    spec = json.loads(tokenizer.backend.to_str())
    names: dict[str, str] = {}
    added = spec.setdefault("added_tokens", [])
    for index, token in enumerate(added):
        if token["id"] in tokenizer.control_ids:
            added[index] = _control_token(token["id"])
            names[token["content"]] = added[index]["content"]
    if end_id is not None:
        added.append(_control_token(end_id))
    _rename_pieces(spec["model"], names)
    spec["post_processor"] = None  # it names control tokens, and adds them to nothing here
    if spec.get("decoder"):
        spec["decoder"] = _without_metaspace(spec["decoder"])
    return json.dumps(spec)


def _control_token(token_id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": f"{_CONTROL}{token_id}", "special": True, **flags}


def _rename_pieces(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename pieces of a vocabulary, and forget the merges that would make them of text."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))
        ]


def _without_metaspace(decoder: dict[str, Any]) -> dict[str, Any]:
    if decoder["type"] == "Sequence":
        return {**decoder, "decoders": [_without_metaspace(each) for each in decoder["decoders"]]}
    if decoder["type"] == "Metaspace":
        mark = decoder.get("replacement", "\u2581")
        return {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    return decoder
