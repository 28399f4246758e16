"""What happens to the cold file while an engine works with it: the run goes on, with the tokens that it would
have had without any tier."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from functools import cache as once
from pathlib import Path

import pytest
from keeping import LANES, keep
from tiny import Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.cache.tiers import cold_file
from minikv.config import TierConfig
from minikv.errors import ConfigError
from minikv.sampling import SamplingParams
from minikv.scheduler import prefix

BLOCK = 16
DOCUMENT = prompt(40, seed=1)
PROMPTS = [(DOCUMENT if n % 2 else []) + prompt(25 + n, seed=n) for n in range(6)]
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
CACHES = {"full": None, "merging": keep("gracekv", 0.6)}


def full_disk(path, monkeypatch):
    def pwrite(descriptor, data, offset):
        if offset + len(data) <= size:
            return write(descriptor, data, offset)
        written = max(0, size - offset)  # as much as there is room for
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:written], offset)

    size, write = path.stat().st_size + 10_000, os.pwrite
    monkeypatch.setattr(cold_file.os, "pwrite", pwrite)


def failing(name):
    def fail(path, monkeypatch):
        def call(*_):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(cold_file.os, name, call)

    return fail


def read_only_directory(path, monkeypatch):
    def refuse(target, *rest):
        if Path(target).parent == path.parent:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(target, *rest)

    real = os.open
    monkeypatch.setattr(cold_file.os, "open", refuse)
    monkeypatch.setattr(cold_file.os, "replace", refuse)


def flipped(path, _):
    data, choose = bytearray(path.read_bytes()), random.Random(1)
    for _ in range(400):
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    with path.open("r+b") as file:
        file.write(data)


def zeroed(path, _):
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def other_file(path, _):
    path.unlink()
    path.write_text("notes of somebody else", encoding="utf-8")


FAULTS = {
    "none": lambda path, _: None,
    "full disk": full_disk,
    "no writes": failing("pwrite"),
    "no reads": failing("pread"),
    "read-only directory": read_only_directory,
    "deleted": lambda path, _: path.unlink(),
    "folder deleted": lambda path, _: shutil.rmtree(path.parent),
    "another file": other_file,
    "flipped bits": flipped,
    "zeroed": zeroed,
    "emptied": lambda path, _: os.truncate(path, 0),
    "cut off": lambda path, _: os.truncate(path, path.stat().st_size // 2),
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(prefix, "BLOCK_TOKENS", BLOCK)


@once
def decoder():
    return tiny_decoder()


@once
def without_tiers(name):
    engine = tiny_engine(decoder(), prefill_chunk=24)
    return start(engine, name)[0], drain(engine).tokens


def start(engine, name):
    params = [greedy(20), SAMPLED]
    return [engine.add(p, params[n % 2], cache=CACHES[name])[0] for n, p in enumerate(PROMPTS)], Collector()


def small_engine(path, warm):
    tiers = TierConfig(hot=hot_bytes(40 * LANES), warm=warm, cold=f"{path}:220KiB")
    return tiny_engine(decoder(), tiers=tiers, prefill_chunk=24, max_seqs=4)


def end_of(engine):
    """Nothing of the run is left below, whatever became of the file."""
    engine.store.check()
    assert engine.store.pool.bytes_in_use == 0
    assert not engine.storage._own and not engine.scheduler.swap.demoted
    engine.storage.tiers.check()
    engine.close()


@pytest.mark.parametrize(
    ("name", "warm", "moment"), [("full", None, 12), ("full", "40KiB", 20), ("merging", None, 12)]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_batch_says_what_it_says_without_tiers(tmp_path, monkeypatch, fault, name, warm, moment):
    expected_ids, expected = without_tiers(name)
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "kv.cold"
    engine = small_engine(path, warm)
    ids, collector = start(engine, name)
    assert ids == expected_ids
    for _ in range(moment):
        collector.take(engine.step())
    with monkeypatch.context() as patch:
        FAULTS[fault](path, patch)
        assert drain(engine, collector).tokens == expected
        report = engine.storage.report()
        end_of(engine)
    if fault == "none":
        assert report["demotions"] and report["prefix_hits"]
        assert name != "full" or report["sequences_restored"]
    try:
        later = small_engine(path, warm)
    except ConfigError as refused:  # it is no cold file any more, or has no folder
        sentence = str(refused)
        assert re.fullmatch(r"[^\n]*(cold tier|newer version)[^\n]*\.", sentence)
        return
    _, collector = start(later, name)
    assert drain(later, collector).tokens == expected
    end_of(later)
