"""Tokenizers of the sentencepiece kind, built in memory."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
WORDS = ("▁the", "▁cat", "▁sat", "the", "cat", "sat")
LETTERS = "abcdefghijklmnopqrstuvwxyz<>/.,!?\n"


def metaspace_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text.

    Args:
        kind: ``"unigram"`` (Metaspace, control tokens among the pieces, as T5), ``"bpe-always"``
            and ``"bpe-first"`` (Metaspace with that scheme) or ``"bpe-prepend"`` (a normalizer
            puts the space, bytes as fallback, as Llama 2).
    """
    pieces = [*SPECIAL_TOKENS, "▁", *WORDS, *LETTERS]
    if kind == "unigram":
        scores = [0.0, 0.0, 0.0, -4.0, *(-2.0 for _ in WORDS), *(-5.0 for _ in LETTERS)]
        model = models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=0)
    else:
        pieces += [f"<0x{byte:02X}>" for byte in range(256)]
        merges = [("t", "h"), ("th", "e"), ("c", "a"), ("ca", "t"), ("s", "a"), ("sa", "t")]
        merges += [("▁", "the"), ("▁", "cat"), ("▁", "sat")]
        vocab = {p: i for i, p in enumerate(dict.fromkeys([*pieces, "th", "ca", "sa"]))}
        model = models.BPE(
            vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    backend = Tokenizer(model)
    if kind == "bpe-prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        scheme = "first" if kind == "bpe-first" else "always"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
        )
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
