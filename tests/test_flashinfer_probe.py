"""When the FlashInfer backend is chosen, and what is said about it; with neither package nor device."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
import torch

from minikv.errors import ConfigError
from minikv.kernels import backend as backends
from minikv.kernels.backend import choose_backend
from minikv.kernels.flashinfer import library, probe
from minikv.kernels.triton import probe as triton_probe

FITTING = {"device": "cuda", "head_dim": 128, "page_size": 16, "kv_dtype": "auto"}
PACKAGE = SimpleNamespace(__version__="0.7.4")


@pytest.fixture
def here(monkeypatch):
    """A machine on which all is well, and what can be changed of it."""
    facts = SimpleNamespace(
        packages={"triton", "flashinfer"}, release="0.7.4", capability=(9, 0), nvcc="found", found=True
    )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for module in (probe, triton_probe):
        monkeypatch.setattr(module, "installed", lambda name: name in facts.packages)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: facts.release)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: facts.found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: facts.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(probe.shutil, "which", lambda name: facts.nvcc)
    monkeypatch.setattr(probe.Path, "exists", lambda path: False)
    monkeypatch.setattr(library, "load", lambda: PACKAGE)
    return facts


@pytest.fixture
def made(monkeypatch):
    """The backends in the place of the real ones: their modules import triton."""

    def module(path, name):
        def make(*given):
            return SimpleNamespace(name=name, given=given)

        monkeypatch.setitem(sys.modules, path, SimpleNamespace(**{name: make}))

    module("minikv.kernels.flashinfer.backend", "FlashInferBackend")
    module("minikv.kernels.triton.backend", "TritonBackend")


def test_where_all_is_well_the_package_is_given(here):
    assert probe.load(**FITTING) is PACKAGE
    assert probe.load(**FITTING | {"device": "auto", "kv_dtype": "bfloat16"}) is PACKAGE


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"packages": {"triton"}}, {}, r"flashinfer is not installed \(pip install 'minikv\[flashinfer\]'\)"),
        ({"packages": {"flashinfer"}}, {}, "need Triton's kernels, and triton is not installed"),
        ({"found": False}, {}, "need Triton's kernels, and torch finds no CUDA device"),
        ({}, {"head_dim": 96}, "FlashInfer's head_dim is 64, 128 or 256, not 96"),
        ({}, {"page_size": 8}, "its pages have 16 or 32 entries, not 8"),
        ({}, {"kv_dtype": "int8"}, "FlashInfer reads a KV cache in float16 or bfloat16, not int8"),
        ({"release": "0.8.1"}, {}, "written for flashinfer 0.7, and 0.8.1 is installed"),
        ({"capability": (7, 5)}, {}, "compute capability 8.0 or more"),
        ({"nvcc": None}, {}, "FlashInfer compiles its kernels, and there is no nvcc"),
    ],
)
def test_what_is_missing_is_said(here, changes, options, words):
    vars(here).update(changes)
    given = FITTING | options
    with pytest.raises(ConfigError, match=f"backend flashinfer cannot be used: .*{words}") as caught:
        choose_backend("flashinfer", "cuda", 1, given["head_dim"], given["page_size"], given["kv_dtype"])
    assert "\n" not in str(caught.value)


def test_a_folder_of_its_name_is_not_the_package(here, made, monkeypatch):
    """Such as a clone of its sources in the working directory, which Python would import."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    _, reason = choose_backend("auto", "cuda", 1, 128)
    assert "because flashinfer is not installed" in reason


def test_kernels_that_are_compiled_already_need_no_compiler(here):
    here.nvcc = None
    here.packages.add("flashinfer_jit_cache")
    assert probe.load(**FITTING) is PACKAGE


def test_interpreted_triton_is_for_the_cpu(here, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert probe.load(**FITTING | {"device": "auto"}) == "FlashInfer has no kernels for the CPU"


def test_a_package_that_cannot_be_imported_is_a_reason(here, monkeypatch):
    def fail():
        raise ImportError("No module named 'tvm_ffi'\nsecond line")

    monkeypatch.setattr(library, "load", fail)
    assert probe.load(**FITTING) == "flashinfer cannot be imported (No module named 'tvm_ffi')"


@pytest.mark.parametrize(
    ("name", "why"), [("auto", "because they are installed and fit"), ("flashinfer", "as asked")]
)
def test_it_is_taken_on_a_device_that_it_fits(here, made, name, why):
    backend, reason = choose_backend(name, "cuda", 1, 128)
    assert backend.name == "FlashInferBackend" and backend.given == (PACKAGE, torch.device("cuda", 0), 1)
    assert reason.startswith("FlashInfer 0.7.4 on NVIDIA H200, with Triton kernels") and why in reason


def test_auto_takes_triton_where_it_does_not_fit_and_says_why(here, made):
    backend, reason = choose_backend("auto", "cuda", 1, 128, None, "int8")
    assert backend.name == "TritonBackend"
    assert reason == (
        "Triton kernels on NVIDIA H200, because FlashInfer reads a KV cache in float16 or bfloat16, not int8"
    )


def test_auto_without_a_device_stays_on_the_cpu(here):
    backend, _ = choose_backend("auto", "auto", 1, 128)
    assert backend.name in ("cpu", "torch")


def test_every_backend_for_devices_is_one():
    assert set(backends.ON_DEVICES) <= set(backends.BACKENDS)
