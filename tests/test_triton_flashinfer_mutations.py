"""Deliberate faults in copies of the FlashInfer backend: each must fail the check that the backend passes."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
from flashinfer_tools import batch_with, documented
from test_triton_flashinfer import check
from triton_tools import INTERPRETED_ONLY

import minikv.kernels.flashinfer as package

pytestmark = INTERPRETED_ONLY

# What is wrong, the module, what stands there and what stands there then.
FAULTS = [
    ("base 2 given out as natural", "runs", "lse * math.log(2)", "lse"),
    ("scores by the head size", "runs", "1 / math.sqrt(kind.head_dim)", "1 / kind.head_dim"),
    ("chunks without a causal mask", "runs", "causal=True", "causal=False"),
    ("no tensor cores for odd groups", "runs", "use_tensor_cores=True", "use_tensor_cores=False"),
    ("keys for values", "runs", "(keys.unsqueeze(2), values", "(values.unsqueeze(2), keys"),
    ("where lanes end is not taken in again", "runs", "self._last.copy_(last)", "pass"),
    ("a plan is kept for more pages", "runs", "(requests.counts, requests.pages, requests.places)",
     "(requests.counts,)"),
    ("one wrapper for two plans of a step", "runs", "and run not in busy", ""),
    ("the last page one entry short", "shares", "length - (pages - 1) * page_size,",
     "np.maximum(1, (length - 1) % page_size),"),
    ("the last page always full", "shares", "length - (pages - 1) * page_size,", "0 * pages + page_size,"),
    ("a row does not see itself", "shares", "counts[:, None, None] - first",
     "counts[:, None, None] - first - 1"),
    ("pages of the other head's lane", "shares", "kv_heads + heads) * width",
     "kv_heads + 1 - heads) * width"),
    ("pages from the lane's beginning", "shares", "+ first // page_size", ""),
    ("the masses are ignored", "shares", "ends * np.array(batch.has_mass",
     "0 * ends * np.array(batch.has_mass"),
    ("the last page with masses is taken", "shares", "-(-_mass_ends(batch, past) // page_size)",
     "_mass_ends(batch, past) // page_size"),
    ("query heads of the other group", "shares", "np.repeat(heads, counts)",
     "np.repeat(heads[::-1], counts)"),
    ("rows that see no entry", "shares", "np.maximum(counts - length, 0)", "0 * counts"),
    ("rows from the first new one", "shares", "starts[chosen], kv_heads) + blind",
     "starts[chosen], kv_heads)"),
    ("the two results are not merged", "backend", "if part.share.joined:", "if False:"),
    ("pages of another layer", "backend", "plan.by_layer[layer]", "plan.by_layer[0]"),
    ("lengths of another layer", "backend", "runs[index] for index in share.by_layer",
     "runs[0] for index in share.by_layer"),
    ("Triton reads a page too many", "backend", "torch.from_numpy(division.limits)",
     "torch.from_numpy(division.limits) + 16"),
]  # fmt: skip


@pytest.fixture
def copy_of_backend(tmp_path, monkeypatch):
    """A function that copies the backend with a fault and returns one of it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(module: str = "", old: str = "", new: str = ""):
        name = f"backend_{tmp_path.name.replace('-', '_')}"
        shutil.copytree(Path(package.__path__[0]), tmp_path / name)
        for file in (tmp_path / name).glob("*.py"):
            text = file.read_text()
            if file.stem == module:
                assert old in text, f"{module} has no {old!r}"
                text = text.replace(old, new)
            file.write_text(text.replace("minikv.kernels.flashinfer", name))
        importlib.import_module(f"{name}.shares").TAIL = 20
        importlib.import_module(f"{name}.runs").WORKSPACE_BYTES = 1 << 24
        return importlib.import_module(f"{name}.backend").FlashInferBackend(documented())

    yield make
    for name in [name for name in sys.modules if name.startswith("backend_")]:
        del sys.modules[name]


def check_small(backend):
    """Some of every kind, with and without masses, and then again with an entry and with a page more."""
    for more in (0, 1, 9):
        lengths = [[60, 41], [33 + more, 5], [20 + more, 24 + more], [29, 36], [50, 44]]
        masses = {0: 18, 3: 30, 4: 17}
        check(backend, batch_with([1, 1, 1, 24, 3], lengths, masses, seed=more), 5)


def test_the_copy_passes(copy_of_backend):
    check_small(copy_of_backend())


@pytest.mark.parametrize(("module", "old", "new"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_is_found(copy_of_backend, module, old, new):
    backend = copy_of_backend(module, old, new)
    with pytest.raises(AssertionError):
        check_small(backend)
