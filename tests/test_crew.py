"""Layers of a compression side by side: order, memory, errors, and the same bits on any number of threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from merging import Pairs
from test_compress import Ordered, cache, filled
from test_merging import entries, evidence
from tiny import TINY, tiny_decoder

from minikv.cache.compress import Compressor
from minikv.cache.crew import Crew, crew_size
from minikv.cache.evidence import Recorded
from minikv.cache.policies.gracekv import GraceKV
from minikv.kernels.cpu.backend import CpuBackend
from minikv.kernels.cpu.library import LibraryMissing, load_library
from minikv.kernels.torch_cpu import TorchBackend

TOKENS = 150


def backends():
    try:
        load_library()
    except LibraryMissing:
        return [TorchBackend]
    return [TorchBackend, CpuBackend]


@pytest.fixture(autouse=True)
def threads_of_torch():
    """Torch has three threads before, and is to have them after."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_is_made_comes_in_order_whoever_is_done_first(size):
    order = threading.Event()

    def work(number):
        if number == 0 and size > 1:
            assert order.wait(10)  # until a later one is done
        order.set()
        return -number

    with Crew(size) as crew:
        assert list(crew.map(work, range(20))) == [-number for number in range(20)]


def test_everyone_works_with_one_thread_of_torch_and_without_gradients():
    def state(_):
        return torch.get_num_threads(), torch.is_inference_mode_enabled()

    with Crew(4) as crew:
        assert set(crew.map(state, range(20))) == {(1, True)}
        assert torch.get_num_threads() == 1
    with Crew(1) as crew:
        assert [threads for threads, _ in crew.map(state, range(2))] == [3, 3]


@pytest.mark.parametrize("ahead", [True, False])
def test_no_more_is_given_out_than_is_worked_on_and_one_beside(ahead):
    given = []

    def giving():
        for number in range(12):
            given.append(number)
            yield number

    with Crew(3) as crew:
        for number in crew.map(lambda number: number, giving(), ahead=ahead):
            assert len(given) <= number + (4 if ahead else 1)


def test_threads_that_are_new_to_torch_meanwhile_start_with_their_own_number():
    before, found = torch.get_num_threads(), []
    with Crew(3) as crew:
        list(crew.map(lambda number: number, range(4)))
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert found == [before] and torch.get_num_threads() == before


def test_an_interrupt_while_the_crew_is_waited_for_gives_threads_back(monkeypatch):
    before = torch.get_num_threads()

    def interrupted(pool, **_):
        shutdown(pool)
        raise KeyboardInterrupt

    shutdown = ThreadPoolExecutor.shutdown
    with pytest.raises(KeyboardInterrupt), Crew(2):
        monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
    assert torch.get_num_threads() == before


def test_a_crew_that_cannot_start_leaves_no_thread_waiting(monkeypatch):
    before, running = torch.get_num_threads(), threading.active_count()
    submit, calls = ThreadPoolExecutor.submit, []

    def failing(pool, *args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("no more threads")
        return submit(pool, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", failing)
    with pytest.raises(RuntimeError, match="no more threads"), Crew(4):
        pass
    assert torch.get_num_threads() == before and threading.active_count() == running


def test_an_error_is_that_of_the_first_that_failed_and_leaves_no_thread():
    def work(number):
        if number >= 3:
            raise ValueError(str(number))

    before = threading.active_count()
    with pytest.raises(ValueError, match=r"^3$"), Crew(4) as crew:
        list(crew.map(work, range(30)))
    assert threading.active_count() == before


def test_a_crew_is_no_larger_than_memory_lets_it_be():
    assert crew_size(8, 1 << 20) == 8
    assert crew_size(64, 16 << 20) == 7
    assert crew_size(64, 1 << 40) == 1
    assert crew_size(1, 1) == 1


@pytest.mark.parametrize("kind", backends())
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("merging", [False, True])
def test_entries_are_the_same_bits_on_any_number_of_threads(kind, refit, merging, monkeypatch):
    config = cache(0.2, sinks=2, recent=3, refit=refit)

    def compressed(threads):
        (store, seq), decoder = filled(TOKENS), tiny_decoder(kind(threads))
        recorded = evidence(TOKENS) if merging or refit else Recorded()
        scores = torch.arange(TOKENS).float().sin()
        policy = GraceKV(4, decoder.rope) if merging else Ordered(scores)
        Compressor(store, decoder).compress(seq, policy, config, TOKENS, recorded)
        store.check()
        return entries(store, seq)

    torch.set_num_threads(1)
    alone = compressed(1)
    torch.set_num_threads(3)
    sizes = []
    monkeypatch.setattr(
        "minikv.cache.compress.crew_size", lambda *of: sizes.append(crew_size(*of)) or sizes[-1]
    )
    for threads in (2, 3, 8):
        assert all(torch.equal(*pair) for pair in zip(alone, compressed(threads), strict=True))
    assert set(sizes) == {2, 3, 8}


def test_a_layer_that_fails_leaves_those_before_it_replaced_and_the_rest_as_they_were():
    class Failing(Pairs):
        def merge(self, view, measured, assignment, protected):
            if view.layer == TINY.num_layers - 1:
                raise MemoryError
            return super().merge(view, measured, assignment, protected)

    (store, seq), decoder = filled(40), tiny_decoder(TorchBackend(3))
    config = cache(20, sinks=0, recent=0)
    with pytest.raises(MemoryError):
        Compressor(store, decoder).compress(seq, Failing(), config, 40, Recorded())
    store.check()
    assert store.lengths[seq][-1].tolist() == [40] * TINY.num_kv_heads
    assert (store.lengths[seq][:-1] < 40).all()
