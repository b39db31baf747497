"""Buffers are reused, of fitting size, and bounded."""

from __future__ import annotations

import threading

import pytest
import torch

from pc_rag.model.buffer_pool import BufferPool, KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=3, key_dim=4, value_dim=4)
ROW_BYTES = 2 * 3 * 8 * 4


def pool(capacity_bytes=1 << 30, shape=SHAPE):
    return BufferPool(
        shape, dtype=torch.float32, device=torch.device("cpu"), capacity_bytes=capacity_bytes
    )


def test_bytes_per_token_count_keys_and_values_of_all_layers():
    """2 layers, 3 heads, 4 + 4 channels."""
    assert SHAPE.bytes_per_token(torch.float32) == ROW_BYTES
    assert SHAPE.bytes_per_token(torch.bfloat16) == ROW_BYTES // 2
    assert KVShape(1, 1, 6, 2).bytes_per_token(torch.float32) == 32


def test_buffer_has_the_shape_of_the_model():
    """Keys and values may differ in size; a buffer starts empty."""
    tail = pool(shape=KVShape(2, 3, 4, 6)).take(10, batch_size=5)
    assert tail.keys.shape[:3] == tail.values.shape[:3] == (2, 5, 3)
    assert (tail.keys.shape[4], tail.values.shape[4]) == (4, 6)
    assert tail.capacity >= 10
    assert tail.num_rows == 0


def test_buffer_is_taken_again_when_it_was_given_back():
    """The next request of like size fills the same memory, from the front."""
    buffers = pool()
    tail = buffers.take(100)
    tail.num_rows = 60
    buffers.give_back(tail)
    again = buffers.take(90)
    assert again.keys.data_ptr() == tail.keys.data_ptr()
    assert again.num_rows == 0
    assert buffers.take(90).keys.data_ptr() != tail.keys.data_ptr()


@pytest.mark.parametrize(("num_rows", "is_reused"), [(1, False), (200, False), (600, True)])
def test_buffer_more_than_twice_as_large_is_left_alone(num_rows, is_reused):
    """A short request does not sit on a long request's buffer."""
    buffers = pool()
    tail = buffers.take(1000)
    buffers.give_back(tail)
    found = buffers.take(num_rows)
    assert (found.keys.data_ptr() == tail.keys.data_ptr()) is is_reused
    assert found.capacity >= num_rows


def test_smallest_fitting_buffer_is_taken():
    """Of several, the best fit."""
    buffers = pool()
    tails = [buffers.take(size) for size in (1000, 512, 760)]
    for tail in tails:
        buffers.give_back(tail)
    assert buffers.take(500).keys.data_ptr() == tails[1].keys.data_ptr()
    assert buffers.take(600).keys.data_ptr() == tails[2].keys.data_ptr()


def test_batch_buffers_are_not_mixed_with_single_ones():
    """Another batch size is another buffer."""
    buffers = pool()
    tail = buffers.take(100, batch_size=2)
    buffers.give_back(tail)
    assert buffers.take(100).keys.shape[1] == 1
    assert buffers.take(100, batch_size=2).keys.data_ptr() == tail.keys.data_ptr()


def test_idle_bytes_stay_within_the_limit():
    """What was idle longest is freed first; what is in use does not count."""
    one = 256 * ROW_BYTES
    buffers = pool(capacity_bytes=2 * one)
    tails = [buffers.take(256) for _ in range(4)]
    for tail in tails:
        buffers.give_back(tail)
        assert buffers.idle_bytes <= 2 * one
    again = {buffers.take(256).keys.data_ptr() for _ in range(2)}
    assert again == {tail.keys.data_ptr() for tail in tails[2:]}
    assert buffers.idle_bytes == 0
    nothing = pool(capacity_bytes=0)
    nothing.give_back(nothing.take(1))
    assert nothing.idle_bytes == 0


def test_no_two_threads_hold_one_buffer():
    """Every buffer has one taker at a time."""
    buffers, held, lock, clashes = pool(), set(), threading.Lock(), []

    def run():
        for _ in range(200):
            tail = buffers.take(100)
            with lock:
                if tail.keys.data_ptr() in held:
                    clashes.append(tail)
                held.add(tail.keys.data_ptr())
            with lock:
                held.discard(tail.keys.data_ptr())
            buffers.give_back(tail)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
