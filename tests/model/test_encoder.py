"""Batches of modules: what comes out equals encoding one by one, and belongs to its job."""

from __future__ import annotations

import random

import pytest
import torch

from pc_rag.errors import StoreError
from pc_rag.kv.key import EntryAddress, VisibilityContext
from pc_rag.model.detection.detect import runner_of
from pc_rag.model.encoder import EncodeJob, Encoder, context_segments
from pc_rag.types import Fingerprint, StorageDtype, Visibility
from tests.support.tiny_models import FAMILIES, tiny_model

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def tiny_runner(family="llama", **options):
    model, _ = tiny_model(family, **options)
    return runner_of(model)


def address(token_ids, start=0, context=(), dtype=StorageDtype.FLOAT32):
    ids = [i for entry in context for i in entry.address.token_ids]
    return EntryAddress(
        fingerprint=Fingerprint("test"),
        token_ids=tuple(token_ids),
        context=VisibilityContext.of(Visibility.PREFIX, ids, range(len(ids))),
        start=start,
        dtype=dtype,
    )


def encode_one(runner, job):
    ((index, entry),) = Encoder(runner).encode([job])
    assert index == 0
    return entry


def texts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def watch_batches(runner):
    """Shapes of the batches that a runner computes."""
    shapes = []
    compute = runner.compute

    def watched(view, token_ids, position_ids):
        shapes.append(tuple(token_ids.shape))
        compute(view, token_ids, position_ids)

    runner.compute = watched
    return shapes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_context", [False, True])
def test_batched_entries_equal_entries_encoded_alone(family, has_context):
    """Padding and neighbours in a batch do not show, with and without a shared context."""
    runner = tiny_runner(family)
    context = ()
    if has_context:
        context = (encode_one(runner, EncodeJob(address(range(60, 77)))),)
    segments = context_segments(context)
    start = 17 if has_context else 0
    jobs = [
        EncodeJob(address(ids, start, context), segments)
        for ids in texts([30, 29, 31, 3, 30, 1, 12, 31])
    ]
    shapes = watch_batches(runner)
    found = dict(Encoder(runner).encode(jobs))
    assert len(shapes) < len(jobs), "nothing was batched"
    assert sorted(found) == list(range(len(jobs)))
    for index, job in enumerate(jobs):
        alone = encode_one(runner, job)
        assert found[index].address == job.address
        torch.testing.assert_close(found[index].keys, alone.keys, **CLOSE)
        torch.testing.assert_close(found[index].values, alone.values, **CLOSE)


def test_context_is_seen():
    """An entry behind a context differs from the same text alone at the same place."""
    runner = tiny_runner()
    prefix = encode_one(runner, EncodeJob(address(range(60, 77))))
    behind = encode_one(
        runner, EncodeJob(address((1, 2, 3), 17, (prefix,)), context_segments([prefix]))
    )
    alone = encode_one(runner, EncodeJob(address((1, 2, 3), 17)))
    assert (behind.values - alone.values).abs().max() > 1e-2


def test_results_map_to_their_jobs_when_contexts_and_starts_are_mixed():
    """Jobs of several contexts and starts, in any order, come back under their own index."""
    runner = tiny_runner()
    prefixes = [encode_one(runner, EncodeJob(address(range(s, s + 9)))) for s in (40, 90)]
    contexts = [(), context_segments(prefixes[:1]), context_segments(prefixes[1:])]
    owners = [(), tuple(prefixes[:1]), tuple(prefixes[1:])]
    rng = random.Random(3)
    jobs = []
    for ids in texts([rng.randrange(1, 20) for _ in range(24)]):
        which = rng.randrange(3)
        start = rng.choice([9, 30])
        jobs.append(EncodeJob(address(ids, start, owners[which]), contexts[which]))
    found = dict(Encoder(runner).encode(jobs))
    for index, job in enumerate(jobs):
        torch.testing.assert_close(found[index].keys, encode_one(runner, job).keys, **CLOSE)


def test_padding_and_tokens_of_a_batch_are_bounded():
    """At most a tenth of a batch is padding, and at most 2048 tokens are in it."""
    runner = tiny_runner()
    rng = random.Random(5)
    lengths = [rng.randrange(1, 300) for _ in range(60)]
    shapes = watch_batches(runner)
    for _ in Encoder(runner).encode([EncodeJob(address(ids)) for ids in texts(lengths)]):
        pass
    assert max(rows * width for rows, width in shapes) <= 2048
    num_computed = sum(rows * width for rows, width in shapes)
    assert sum(lengths) <= num_computed <= sum(lengths) / 0.9
    assert len(shapes) < 45


def test_text_longer_than_a_batch_is_encoded_alone():
    """A job larger than the bound is not refused and not cut."""
    runner = tiny_runner(max_position_embeddings=4096)
    long, short = texts([2500, 5])
    found = dict(Encoder(runner).encode([EncodeJob(address(long)), EncodeJob(address(short))]))
    assert [found[0].num_tokens, found[1].num_tokens] == [2500, 5]


@pytest.mark.parametrize("dtype", list(StorageDtype))
def test_entries_own_contiguous_tensors_of_their_dtype(dtype):
    """No entry keeps its batch's buffer alive, and no later batch changes it."""
    runner = tiny_runner()
    jobs = [EncodeJob(address(ids, dtype=dtype)) for ids in texts([8, 8, 8])]
    entries = [entry for _, entry in Encoder(runner).encode(jobs)]
    copies = [(e.keys.clone(), e.values.clone()) for e in entries]
    for entry in entries:
        for tensor in (entry.keys, entry.values):
            assert tensor.is_contiguous()
            assert tensor.dtype is getattr(torch, dtype.value)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    list(Encoder(runner).encode([EncodeJob(address(ids)) for ids in texts([9, 9, 9], seed=1)]))
    for entry, (keys, values) in zip(entries, copies, strict=True):
        assert torch.equal(entry.keys, keys)
        assert torch.equal(entry.values, values)


def test_context_of_another_storage_dtype_is_read_in_the_compute_dtype():
    """Entries stored in bfloat16 can be the context of a float32 model."""
    runner = tiny_runner()
    exact = encode_one(runner, EncodeJob(address(range(60, 77))))
    stored = encode_one(runner, EncodeJob(address(range(60, 77), dtype=StorageDtype.BFLOAT16)))
    entries = [
        encode_one(runner, EncodeJob(address((1, 2, 3), 17), context_segments([context])))
        for context in (exact, stored)
    ]
    torch.testing.assert_close(entries[0].keys, entries[1].keys, atol=0.1, rtol=0.1)


def test_empty_text_is_refused_before_anything_is_computed():
    """An entry has tokens."""
    runner = tiny_runner()
    shapes = watch_batches(runner)
    with pytest.raises(StoreError, match="at least one token"):
        list(Encoder(runner).encode([EncodeJob(address((1, 2))), EncodeJob(address(()))]))
    assert shapes == []


def test_buffer_is_given_back_when_the_model_raises():
    """An error in a batch leaves the pool as it was."""
    runner = tiny_runner()
    list(Encoder(runner).encode([EncodeJob(address((1, 2)))]))
    idle = runner.pool.idle_bytes

    def fail(*_):
        raise ZeroDivisionError

    handle = runner._model.base_model.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        list(Encoder(runner).encode([EncodeJob(address((1, 2)))]))
    handle.remove()
    assert runner.pool.idle_bytes == idle > 0


def test_pass_is_told_with_its_tokens_when_a_rate_learns_from_it():
    """Padding is no token, of whichever row; the context is that of one row."""
    runner, passes = tiny_runner(), []

    class Rate:
        def record(self, num_tokens, seconds, *, num_context_tokens):
            passes.append((num_tokens, num_context_tokens))
            assert seconds > 0

    encoder = Encoder(runner, rate=Rate())
    shapes = watch_batches(runner)
    ((_, context),) = encoder.encode([EncodeJob(address(range(60, 77)))])
    segments = context_segments((context,))
    jobs = [EncodeJob(address(ids, 17, (context,)), segments) for ids in texts([30, 29, 28])]
    assert len(list(encoder.encode(jobs))) == 3
    assert shapes == [(1, 17), (3, 30)]
    assert passes == [(17, 0), (87, 17)]
