"""Memory that runs out, on a device or on the host, is a sentence with the bytes and a way out."""

from __future__ import annotations

import pytest
import torch
from cli_tools import write_tiny_model
from session_tools import begun, load
from tiny import alone, drain, greedy, prompt, tiny_engine

from minikv import LLM, CacheConfig, ConfigError, ModelError, SessionError
from minikv.cache.pool import PagePool
from minikv.kernels.torch_cpu import TorchBackend
from minikv.loading import load_model

SAID = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.79 GiB of which ..."
FULL = torch.OutOfMemoryError(SAID)
CONTEXT_REFUSED = RuntimeError("CUDA error: out of memory")
HOST_FULL = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2048 bytes.")


class Away(TorchBackend):
    """A backend on a device of which nothing but its type is there."""

    device = torch.device("meta")


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def loading_fails(model_dir) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(model_dir, CacheConfig(), 1 << 40)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_that_a_device_turns_out_to_have_no_room_for(model_dir, monkeypatch):
    monkeypatch.setattr("minikv.loading.choose_backend", lambda *_: (Away(), "as asked"))
    monkeypatch.setattr("minikv.loading.build_decoder", raising(FULL))
    monkeypatch.setattr("minikv.loading.available_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr("minikv.memory.available_bytes", lambda *_: 1 << 20)
    sentence = loading_fails(model_dir)
    assert "for its weights on device meta, and memory ran out when 20.00 MiB were asked" in sentence
    assert "and 1.0 MiB were free; use" in sentence
    assert sentence.endswith("; use a smaller model or dtype bf16, or free some memory.")


def test_weights_that_a_device_says_it_has_no_room_for(model_dir, monkeypatch):
    monkeypatch.setattr("minikv.loading.choose_backend", lambda *_: (Away(), "as asked"))
    monkeypatch.setattr("minikv.loading.available_bytes", lambda device: {"meta": 100}[device.type])
    assert "for its weights on device meta, and 100 B are free; use" in loading_fails(model_dir)


def test_a_device_that_is_full_before_anything_is_loaded(model_dir, monkeypatch):
    monkeypatch.setattr("minikv.loading.choose_backend", lambda *_: (Away(), "as asked"))
    for module in ("minikv.loading", "minikv.memory"):
        monkeypatch.setattr(f"{module}.available_bytes", raising(CONTEXT_REFUSED))
    assert "for its weights on device meta, and memory ran out; use a smaller" in loading_fails(model_dir)


def test_weights_that_the_host_has_no_room_for(model_dir, monkeypatch):
    monkeypatch.setattr("minikv.loading.build_decoder", raising(HOST_FULL))
    sentence = loading_fails(model_dir)
    assert "for its weights, and memory ran out when 2.0 KiB were asked for and" in sentence
    assert sentence.endswith("use a smaller model or weights in fewer bits, or free some memory.")


def test_another_fault_while_loading_is_not_called_a_shortage(model_dir, monkeypatch):
    monkeypatch.setattr("minikv.loading.build_decoder", raising(RuntimeError("a fault of the program")))
    with pytest.raises(RuntimeError, match="a fault of the program"):
        load_model(model_dir, CacheConfig(), 1 << 40)


def test_a_pool_without_room_is_refused_with_its_bytes(monkeypatch):
    monkeypatch.setattr("minikv.cache.mapped.DeviceZeros.__init__", raising(FULL))
    with pytest.raises(ConfigError, match=r"pool of 26,880 bytes could not be allocated; ask for less with"):
        PagePool(10, 16, 40, torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FULL, "ran out of memory in a step when 20.00 MiB were asked for and"),
        (torch.cuda.OutOfMemoryError("no numbers"), "ran out of memory in a step when"),
        (HOST_FULL, "The machine ran out of memory in a step when 2.0 KiB were asked for and"),
        (MemoryError(), "The machine ran out of memory in a step when"),
    ],
)
def test_a_step_without_room_ends_its_requests_and_no_other(error, words, monkeypatch):
    engine = tiny_engine()
    (failing,) = engine.add(prompt(9), greedy(4))
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", raising(error))
        (event,) = engine.step()
    assert (event.request_id, event.reason) == (failing, "error")
    assert words in event.message and "were free; lower kv_hot, max_seqs or prefill_chunk." in event.message
    assert engine.store.pool.num_free == engine.store.pool.num_pages
    (request,) = engine.add(prompt(12), greedy(4))
    assert drain(engine).tokens[request] == alone(prompt(12), greedy(4))


def test_completions_that_cannot_be_copied_are_computed(monkeypatch):
    engine, wanted = tiny_engine(), alone(prompt(20), greedy(4))
    monkeypatch.setattr(engine.store.pool, "copy_pages", raising(FULL))
    requests = engine.add(prompt(20), greedy(4, n=3))
    collector = drain(engine)
    assert [collector.tokens[request] for request in requests] == [wanted] * 3
    assert engine.store.pool.num_free == engine.store.pool.num_pages


def test_a_session_without_room_on_the_device_is_refused(model_dir, tmp_path, monkeypatch):
    with load(model_dir) as llm:
        session = begun(llm)
        session.save(tmp_path / "talk")
        free = llm.engine.store.pool.num_free
        monkeypatch.setattr(PagePool, "put", raising(FULL))
        monkeypatch.setattr(PagePool, "put_rows", raising(FULL))
        with pytest.raises(SessionError, match="there is not enough memory"):
            llm.load_session(tmp_path / "talk")
        assert llm.engine.store.pool.num_free == free


def test_the_sentence_reaches_who_loads(model_dir, monkeypatch):
    monkeypatch.setattr("minikv.loading.build_decoder", raising(FULL))
    with pytest.raises(ModelError, match="memory ran out when"):
        LLM(str(model_dir))
