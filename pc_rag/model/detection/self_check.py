"""What every model has to show before it is used: entries that stand elsewhere, its own logits.

    placed   a text encoded at one start and placed at another  =  the same text encoded there
    own      behind a stored half that was encoded elsewhere     =  the model by itself, at once

The first half of the second comparison is stored, moved and read in place, the other half is
prefilled behind it and one more token is decoded. So everything that a request does is in it:
encodings, sliding windows, soft-capping, sinks, scaling. Windows that are longer than the text are
lowered for it, in the model's own pass too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from inspect import isfunction
from typing import TYPE_CHECKING, Any

import torch
import transformers

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.attention.attention_pass import AttentionPass
from pc_rag.model.attention.kv_view import KVView, Segment
from pc_rag.model.cache_folder import cache_folder, recall, remember
from pc_rag.model.detection.own_attention import can_lower, own_logits
from pc_rag.model.detection.probing import probe_text, refused, relative_difference, tolerance_of
from pc_rag.model.hf_attention import implementation_of
from pc_rag.model.positions import LayerAttention, ModelPositions
from pc_rag.model.runner import Runner
from pc_rag.types import Placement, Span

if TYPE_CHECKING:
    from pathlib import Path

    from pc_rag.model.attention.kv_view import Tail
    from pc_rag.model.detection.detect import Detection
    from pc_rag.types import Fingerprint

_VERSION = "self-check 1"
"""Changes when what is compared does, or how pc-rag attends."""
_NUM_STORED = 40
_NUM_FRESH = 24
_WINDOW = 16
"""What longer windows are lowered to: shorter than either half."""
_MAX_TOKENS = 1024
"""Longest text that is run to look beyond a window that cannot be lowered."""
_START = 331
"""Where the stored half is encoded, before it is placed at the front. A prime."""
_LIBRARIES = frozenset({"transformers", "torch", "safetensors"})
"""Whose code a model of transformers consists of."""

_PASSED: dict[tuple[str, frozenset[Any]], SelfCheck] = {}
"""Checks that were passed in this process, by what the model was and the code it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """How far a model's stored and moved KV was from what the model computes by itself.

    Differences are relative to the largest number; see ``relative_difference``.

    Attributes:
        placed_difference: Of keys and values placed, to those encoded there.
        own_difference: Of logits over stored KV, to the model's own.
        tolerance: What rounding explains in the model's dtype.
        num_tokens: Length of the text.
        window: Smallest sliding window that was compared; ``None`` where the text was not longer
            than any.
    """

    placed_difference: float
    own_difference: float
    tolerance: float
    num_tokens: int
    window: int | None

    def to_json(self) -> str:
        """The check as a line of text, for keeping."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SelfCheck:
        """The check that ``to_json`` wrote.

        Raises:
            ValueError: The text is not one.
        """
        try:
            check = cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a self-check: {text[:100]!r}") from error
        differences = (check.placed_difference, check.own_difference)
        numbers = (*differences, check.tolerance, check.num_tokens, check.window or 0)
        if not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"not a self-check: {text[:100]!r}")
        if not all(difference <= check.tolerance for difference in differences):
            raise ValueError(f"not a self-check that was passed: {text[:100]!r}")
        return check


def passed_check(
    model: Any,  # noqa: ANN401 - transformers is untyped here
    found: Detection,
    fingerprint: Fingerprint,
    *,
    is_kept: bool,
) -> SelfCheck:
    """``check_model``, once in a process for models of the same fingerprint and the same code.

    Args:
        model: In evaluation mode.
        found: What ``detect`` found out about it.
        fingerprint: Of the model.
        is_kept: Keep the check in the user's cache folder as well, for other processes, where the
            model's code is that of transformers: a fingerprint does not cover code.

    Raises:
        UnsupportedModelError: See ``check_model``.
    """
    versions = (_VERSION, transformers.__version__, torch.__version__)
    where = (implementation_of(model), model.device.type, found.max_position)
    facts = (fingerprint, *versions, *where)
    signature = hashlib.sha256(repr(facts).encode()).hexdigest()
    code = _code_of(model)
    ran = None if code is None else (signature, code)
    if ran in _PASSED:
        return _PASSED[ran]
    is_kept = is_kept and code is not None and all(map(_is_stock, code))
    memo = cache_folder() / "checks" / f"{signature}.json"
    check = _recalled(memo, signature) if is_kept else None
    if check is None:
        check = check_model(model, found)
        if is_kept:
            remember(memo, signature, check.to_json())
    if ran is not None:
        _PASSED[ran] = check
    return check


def _code_of(model: Any) -> frozenset[Any] | None:  # noqa: ANN401 - transformers is untyped here
    """What a model runs, as far as it is patched in practice; ``None`` where a module is its own.

    That is the classes of its modules, their forwards, and the functions beside them.
    """
    modules = list(model.modules())
    if any("forward" in vars(module) for module in modules):
        return None
    kinds = {type(module) for module in modules}
    sources = {source for kind in kinds if (source := sys.modules.get(kind.__module__))}
    beside = {each for source in sources for each in vars(source).values() if isfunction(each)}
    return frozenset(kinds | {kind.forward for kind in kinds} | beside)


def _is_stock(code: Any) -> bool:  # noqa: ANN401 - a class or a function
    """Whether a class or function is that of the libraries, not one that was put in its place."""
    library = (code.__module__ or "").partition(".")[0]
    return library in _LIBRARIES or library in sys.stdlib_module_names


def _recalled(memo: Path, signature: str) -> SelfCheck | None:
    """A kept check; ``None`` where there is none that can be read."""
    kept = recall(memo, signature)
    try:
        return None if kept is None else SelfCheck.from_json(kept)
    except ValueError:
        return None  # written by another version: the check is run again


def check_model(model: Any, found: Detection) -> SelfCheck:  # noqa: ANN401 - transformers is untyped here
    """Compare a model's KV where it is moved, and its logits, with what it computes by itself.

    Args:
        model: In evaluation mode; it is left as it was.
        found: What ``detect`` found out about it.

    Raises:
        UnsupportedModelError: They differ by more than rounding explains.
    """
    name = type(model).__name__
    text = _Text.of(model, found)
    positions = _with_windows(found.positions, text.lowered)
    runner = Runner(model, positions, found.shape, frozen=found.frozen, pool_bytes=0)
    tolerance = tolerance_of(model.dtype)
    with refused(model):
        placed, stored = _placed(runner, text)
        if not placed <= tolerance:
            raise _failed(name, "position encoding", _PLACED, placed, tolerance)
        ours = _logits_over(runner, text, stored)
        own = own_logits(
            model, text.token_ids, num_last=ours.shape[1], frozen=found.frozen,
            window=text.lowered,
        )  # fmt: skip
    difference = float(relative_difference(ours, own))
    if not difference <= tolerance:
        raise _failed(name, "attention", _OWN, difference, tolerance)
    return SelfCheck(
        placed_difference=placed,
        own_difference=difference,
        tolerance=tolerance,
        num_tokens=text.token_ids.shape[1],
        window=text.smallest_window(positions),
    )


_PLACED = (
    "keys and values encoded at one position and placed at another",
    "those encoded there",
    "Its stored KV cannot be moved",
)
_OWN = (
    "logits over stored keys and values",
    "the model's own",
    (
        "Its tokens see those behind them, or its attention does more than pc-rag was told of "
        "(biases, windows, capping, sinks or scaling)"
    ),
)


def _failed(
    name: str, capability: str, what: tuple[str, str, str], difference: float, tolerance: float
) -> UnsupportedModelError:
    ours, theirs, meaning = what
    return UnsupportedModelError(
        f"{name}: {ours} differ from {theirs} by {difference:.2g} of their size; allowed "
        f"{tolerance:.2g}. {meaning}; use another model, or update transformers",
        name,
        capability,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """What is compared.

    Attributes:
        token_ids: ``[1, num_tokens]``.
        num_stored: Tokens of the half that is stored.
        start: Where it is encoded.
        lowered: What longer windows are lowered to; ``None`` leaves them.
    """

    token_ids: torch.Tensor
    num_stored: int
    start: int
    lowered: int | None

    @classmethod
    def of(cls, model: Any, found: Detection) -> _Text:  # noqa: ANN401 - as above
        num_stored, num_tokens = _NUM_STORED, _NUM_STORED + _NUM_FRESH
        windows = [layer.window for layer in found.positions.kinds if layer.window]
        lowered = None
        if max(windows, default=0) > _WINDOW:
            if can_lower(model):
                lowered = _WINDOW
            elif max(windows) + _NUM_FRESH <= _MAX_TOKENS:
                num_tokens = max(windows) + 2 * _NUM_FRESH
                num_stored = num_tokens - _NUM_FRESH
        num_tokens = min(num_tokens, found.max_position)
        num_stored = min(num_stored, num_tokens - 2)
        is_fixed = found.positions.placement is Placement.FIXED
        start = 0 if is_fixed else min(_START, found.max_position - num_stored)
        return cls(probe_text(model, num_tokens), num_stored, start, lowered)

    def smallest_window(self, positions: ModelPositions) -> int | None:
        windows = [layer.window for layer in positions.kinds if layer.window]
        seen = [window for window in windows if window < self.token_ids.shape[1]]
        return min(seen, default=None)


def _with_windows(positions: ModelPositions, lowered: int | None) -> ModelPositions:
    if lowered is None:
        return positions
    kinds = {
        kind: LayerAttention(kind.encoding, lowered if kind.window else None)
        for kind in positions.kinds
    }
    return ModelPositions(tuple(kinds[layer] for layer in positions.layers))


def _placed(runner: Runner, text: _Text) -> tuple[float, Segment]:
    """The difference of placed KV, and the stored half as a segment at the front."""
    here = _encode(runner, text, start=text.start)
    there = _encode(runner, text, start=0)
    placed = runner.positions.place(here.keys[:, 0], -text.start)
    num_stored = text.num_stored
    differences = torch.maximum(
        relative_difference(placed[:, :, :num_stored], there.keys[:, 0, :, :num_stored]),
        relative_difference(here.values[:, 0, :, :num_stored], there.values[:, 0, :, :num_stored]),
    )
    rows = slice(0, num_stored)
    segment = Segment(
        here.keys[:, 0, :, rows], here.values[:, 0, :, rows], Span(0, num_stored), -text.start
    )
    return float(differences.max()), segment


def _encode(runner: Runner, text: _Text, *, start: int) -> Tail:
    tail = runner.pool.take(text.num_stored)
    runner.compute(
        KVView((), tail),
        text.token_ids[:, : text.num_stored],
        range(start, start + text.num_stored),
    )
    return tail


def _logits_over(runner: Runner, text: _Text, stored: Segment) -> torch.Tensor:
    """Logits of the fresh tokens, ``[1, num_fresh, vocab_size]``; the last token is decoded."""
    last = text.token_ids.shape[1] - 1
    position_ids = list(range(text.num_stored, last))
    view = KVView((stored,), runner.pool.take(len(position_ids) + 1))
    view.tail.reserve(len(position_ids))
    prefilled = runner.run_pass(
        AttentionPass(view, runner.positions, position_ids),
        text.token_ids[:, position_ids],
        torch.tensor([position_ids]),
        logits_behind=torch.arange(len(position_ids)),
    )
    view.tail.num_rows += len(position_ids)
    decoded = runner.decode(view, int(text.token_ids[0, last]), last)
    return torch.cat((prefilled, decoded[None, None].to(prefilled.dtype)), dim=1)
