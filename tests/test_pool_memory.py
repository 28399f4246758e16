"""Long runs of freed pages give their memory back to the system, and come back as zeros."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minikv.cache.mapped import MappedZeros
from minikv.cache.pool import PagePool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PAGES, MIB = 8000, 1 << 20


def resident() -> int:
    """Bytes of memory that the system has given to this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def filled(dtype=torch.float32) -> tuple[PagePool, np.ndarray]:
    """A pool whose pages are all taken and written."""
    pool = PagePool(PAGES, 32, 64, dtype)
    ids = pool.allocate(PAGES)
    for mapped in pool._mapped:
        mapped.tensor[1:] = 1
    return pool, ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_freeing_most_of_a_pool_returns_its_memory(dtype):
    pool, ids = filled(dtype)
    full, before = PAGES * pool.page_bytes, resident()
    pool.free(ids[400:])
    returned = before - resident()
    assert returned > 0.9 * full * (PAGES - 400) / PAGES
    kept = torch.from_numpy(ids[:400])
    assert (pool.keys[kept] == 1).all() and (pool.positions[kept] == 1).all()


def test_pages_whose_memory_was_returned_come_back_as_zeros():
    pool, ids = filled()
    pool.free(ids[401:7001])
    again = torch.from_numpy(pool.allocate(6600))
    for mapped in pool._mapped:
        assert not mapped.tensor[again].any()
        assert (mapped.tensor[1:402] == 1).all() and (mapped.tensor[7002:] == 1).all()


def test_short_runs_keep_their_memory():
    pool, ids = filled()
    before = resident()
    pool.free(ids[::2])
    assert abs(before - resident()) < 4 * MIB
    pool.free(ids[1::2])
    assert before - resident() > 0.9 * PAGES * pool.page_bytes


def test_a_system_without_such_mappings_keeps_the_memory_and_loses_nothing(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_DONTNEED")
    zeros = MappedZeros((100, 4096), torch.float32)
    zeros.tensor.fill_(1)
    assert zeros.discard(10, 90) == (10, 10)
    assert (zeros.tensor == 1).all()
    pool, ids = filled()
    pool.free(ids)
    assert not pool.keys[torch.from_numpy(pool.allocate(100))].any()


def test_rows_at_the_edge_of_a_discarded_range_keep_what_they_held():
    zeros = MappedZeros((1000, 100), torch.float32)
    zeros.tensor.fill_(1)
    start, stop = zeros.discard(13, 987)
    assert 13 <= start < stop <= 987
    assert not zeros.tensor[start:stop].any()
    assert (zeros.tensor[:13] == 1).all() and (zeros.tensor[987:] == 1).all()
