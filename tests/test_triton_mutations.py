"""Deliberate faults in copies of the Triton kernels: each must fail the check that the kernels pass."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
from triton_tools import INTERPRETED_ONLY, check_small

import minikv.kernels.triton as package

pytestmark = INTERPRETED_ONLY

# What is wrong, the module, what stands there and what stands there then.
FAULTS = [
    ("a row does not see itself", "attend", "<= past + new[:, None]", "< past + new[:, None]"),
    ("a row sees the next one", "attend", "<= past + new[:, None]", "<= past + 1 + new[:, None]"),
    ("a tile's last entry is not read", "attend", "count - 1) + 1", "count - 1)"),
    ("splits overlap", "attend", "last = tl.minimum(last, first + SPLIT)", "last = last"),
    ("the last split is left out", "attend", "part) + SPLIT) // SPLIT", "part)) // SPLIT"),
    ("the mass is ignored", "blocks", "[None, :] * LOG2_E", "[None, :] * 0.0"),
    ("the mass is taken in base 2", "blocks", "[None, :] * LOG2_E", "[None, :]"),
    ("pages of the next lane", "attend", "lane.to(tl.int64) *", "(lane.to(tl.int64) ^ 1) *"),
    ("the page before", "blocks", "table + entries // PAGE", "table + tl.maximum(entries // PAGE - 1, 0)"),
    ("pages of another layer", "attend", "* num_layers + layer)", "* num_layers)"),
    ("base 2 given out as natural", "attend", "result_lse * LN_2", "result_lse"),
    ("base 2 given out as natural by the merge", "attend", "tl.log2(divisor)) * LN_2", "tl.log2(divisor))"),
    ("parts merged without weights", "attend", "tl.exp2(part_lse - anchor)", "tl.where(held, 1.0, 0.0)"),
    ("parts of the sequence before", "attend", "tl.load(parts + member) + new", "new"),
    ("query heads of another group", "attend", "head * GROUP + place % GROUP", "head + place % GROUP"),
    ("lanes of another group merged", "attend", "query_head // GROUP", "query_head % KV_HEADS"),
    ("the old sum is not scaled down", "blocks", "weighted * kept[:, None] +", "weighted +"),
    ("values without their scales", "blocks", "other=0.0)[:, None]", "other=0.0)[:, None] * 0 + 1"),
    ("keys without their scales", "blocks", "scores *= tl", "scores *= 0 * tl"),
    ("rotated the other way", "rows", "first * c - second * s", "first * c + second * s"),
    ("rows written to the other head's lane", "rows", "(head - QUERY_HEADS) %", "(head - QUERY_HEADS + 1) %"),
    ("int8 rounded down", "rows", "steps + 12582912.0", "steps - 0.49 + 12582912.0"),
]  # fmt: skip


@pytest.fixture
def copy_of_kernels(tmp_path, monkeypatch):
    """A function that copies the kernels with a fault and returns the copy's backend module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(module: str = "", old: str = "", new: str = ""):
        name = f"kernels_{tmp_path.name.replace('-', '_')}"
        shutil.copytree(Path(package.__path__[0]), tmp_path / name)
        for file in (tmp_path / name).glob("*.py"):
            text = file.read_text()
            if file.stem == module:
                assert old in text, f"{module} has no {old!r}"
                text = text.replace(old, new)
            file.write_text(text.replace("minikv.kernels.triton", name))
        return importlib.import_module(f"{name}.backend")

    yield make
    for name in [name for name in sys.modules if name.startswith("kernels_test_")]:
        del sys.modules[name]


def test_a_copy_without_fault_passes(copy_of_kernels):
    check_small(copy_of_kernels().TritonBackend())


@pytest.mark.parametrize(("fault", "module", "old", "new"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found(copy_of_kernels, fault, module, old, new):
    backend = copy_of_kernels(module, old, new).TritonBackend()
    with pytest.raises(AssertionError):
        check_small(backend)
