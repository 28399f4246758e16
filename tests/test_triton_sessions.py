"""Sessions between the layout of a CPU pool and that of a device, as far as one needs no device."""

from __future__ import annotations

import pytest
from cli_tools import write_tiny_model
from moving import CACHES, check_moved, load_at
from triton_tools import INTERPRETED_ONLY

from minikv.kernels.cpu.backend import why_unusable

pytestmark = INTERPRETED_ONLY


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


@pytest.fixture(scope="module")
def on_device(model):
    with load_at(model, backend="triton") as llm:
        yield llm


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_session_goes_from_the_compiled_layout_to_the_devices_and_back(model, on_device, cache, tmp_path):
    name = "torch" if why_unusable(16, None) else "cpu"
    with load_at(model, backend=name, weights="auto" if name == "torch" else "f32") as llm:
        assert llm.engine.store.pool.keys_transposed == (name == "cpu")
        check_moved(llm, on_device, cache, tmp_path)
