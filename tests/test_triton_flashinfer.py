"""The FlashInfer backend over emulated kernels, with Triton's interpreted: equal to the reference."""

from __future__ import annotations

import inspect
import logging
import math

import pytest
import torch
from flashinfer_tools import Recording, batch_with, documented, installed
from triton_tools import INTERPRETED_ONLY, random_rows, run

from minikv.kernels.flashinfer import runs, shares
from minikv.kernels.flashinfer.backend import FlashInferBackend
from minikv.kernels.reference import ReferenceBackend

pytestmark = INTERPRETED_ONLY

# Outputs are rounded to float16, once by each kernel where two results are merged.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=["documented", "installed"])
def library(request, monkeypatch):
    """FlashInfer as it is documented, and its own front end; both on emulated kernels, and recorded."""
    return Recording(documented() if request.param == "documented" else installed(monkeypatch))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory, and tails short enough for the interpreter."""
    monkeypatch.setattr(runs, "WORKSPACE_BYTES", 1 << 24)
    monkeypatch.setattr(shares, "TAIL", 20)


def compare(backend, batch, group, queries=torch.float16, layers=(0, 1)):
    """Fail unless outputs and log-sum-exps of all layers are the reference's, whoever computes them."""
    # Rows that every type holds, so that only the arithmetic differs.
    qkv = random_rows(batch, group).to(torch.bfloat16).to(queries)
    backend.plan(batch)
    for layer in layers:
        q, k, v = backend.rotate_and_write(qkv, batch, layer)
        out, lse = backend.attend(q, k, v, batch, layer)
        expected, expected_lse = ReferenceBackend().attend(q.float(), k.float(), v.float(), batch, layer)
        tolerance = TOLERANCE[batch.pool.dtype if queries == torch.float16 else queries]
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse.float(), expected_lse, atol=tolerance, rtol=tolerance)


def check(backend, batch, group, queries=torch.float16, layers=(0, 1)):
    """The same, and fail if FlashInfer was given up."""
    compare(backend, batch, group, queries, layers)
    assert not backend._broken, "a call was not as it has to be"


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ragged_lanes_without_masses_are_flashinfers(head_dim, group):
    library = Recording(documented())
    page_size = (16, 32)[group % 2]
    lengths = [[page_size, 3], [page_size - 1, 0], [0, page_size + 1], [70, page_size - 2]]
    batch = batch_with([1, 5, 70, 1], lengths, head_dim=head_dim, page_size=page_size, seed=group)
    check(FlashInferBackend(library), batch, group)
    assert not batch.plan.members and library.count("run") == 2 * 3


@pytest.mark.parametrize("queries", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_are_taken_in_the_type_of_the_entries(library, dtype, queries):
    batch = batch_with([1, 6], [[33, 0], [20, 70]], dtype=dtype)
    check(FlashInferBackend(library), batch, 3, queries)
    assert library.count("run") == 4


def test_the_end_of_a_lane_is_read_at_every_place_of_a_page(library):
    rows = [1] * 17 + [2] * 17
    lengths = [[n, 40 - n] for n in range(14, 31)] * 2
    check(FlashInferBackend(library), batch_with(rows, lengths), 2)


@pytest.mark.parametrize("end", [1, 16, 17, 40, 48])
def test_lanes_that_begin_with_masses_are_read_by_both(library, end):
    """Up to the entry before the new rows, and with others beside them."""
    rows, lengths = [1, 24, 70, 1, 3], [[80, 75], [48, 44], [64, 48], [50, 7], [90, 60]]
    batch = batch_with(rows, lengths, {0: end, 1: end, 2: end, 4: 60})
    check(FlashInferBackend(library), batch, 3)
    both = [part.share.sequences.tolist() for part in batch.plan.parts if part.share.joined]
    assert both == [[0], [1], [2]]
    assert [members.limited for members in batch.plan.members] == [False] + [True] * 3


def test_rows_before_the_first_page_without_masses_see_only_what_triton_reads(library):
    batch = batch_with([40], [[37, 16]], {0: 37})
    check(FlashInferBackend(library), batch, 2)
    (part,) = batch.plan.parts
    assert [requests.counts.tolist() for requests in part.share.requests] == [[29, 40], [40, 29]]


def test_lanes_with_masses_to_their_end_are_tritons(library):
    rows, lengths = [1, 6, 1], [[60, 31], [20, 70], [44, 12]]
    batch = batch_with(rows, lengths, {0: 60, 1: 70})
    check(FlashInferBackend(library), batch, 3)
    assert [members.sequences.tolist() for members in batch.plan.members] == [[0], [1]]
    assert [part.share.sequences.tolist() for part in batch.plan.parts] == [[2]]


def test_where_nobody_says_where_masses_end_the_whole_past_has_them(library):
    batch = batch_with([1, 45], [[60, 31], [20, 70]], {0: 9, 1: 9})
    batch.mass_ends = None
    check(FlashInferBackend(library), batch, 3)
    assert [part.share.sequences.tolist() for part in batch.plan.parts] == [[1]]
    assert [members.limited for members in batch.plan.members] == [False, True]


def test_entries_of_no_mass_count_as_masses(library):
    batch = batch_with([1, 4], [[150, 70], [40, 40]], {0: 130, 1: 40})
    batch.pool.log_mass.view(-1)[batch.lane_pages[0, :, :, 2].flatten().long() * 16 + 3] = -math.inf
    batch.pool.log_mass.view(-1)[batch.lane_pages[0, :, :, 0].flatten().long() * 16 + 3] = -1e30
    check(FlashInferBackend(library), batch, 3)


class TestPlans:
    """One plan for all layers of the same lengths, kept for as long as no page is added."""

    @staticmethod
    def batch(rows, lengths, layers=3):
        """Every layer has lanes of the same lengths."""
        batch = batch_with(rows, [[*lanes] for lanes in lengths])
        batch.past_lengths = batch.past_lengths[:, :1].expand(-1, layers, -1).contiguous()
        batch.lane_pages = batch.lane_pages[:, [0] * layers].contiguous()
        batch.mass_ends = torch.zeros_like(batch.past_lengths)
        batch.__dict__.pop("slots", None)
        return batch

    def test_layers_alike_are_planned_for_once(self, library):
        check(
            FlashInferBackend(library), self.batch([1, 1, 5], [[20, 7], [33, 0], [9, 9]]), 3, layers=(0, 1, 2)
        )
        assert library.count("plan") == 2 and library.count("run") == 6

    def test_layers_of_two_lengths_are_planned_for_twice(self, library):
        check(FlashInferBackend(library), batch_with([1, 1], [[20, 7], [33, 0]]), 3)
        assert library.count("plan") == 2 and library.count("__init__") == 2

    def test_decoding_is_planned_for_again_when_a_page_is_added(self, library):
        backend = FlashInferBackend(library)
        planned = []
        for length in range(27, 36):
            batch = self.batch([1, 1], [[length, length + 2], [9, length]])
            check(backend, batch, 2, layers=(0, 2))
            planned.append(library.count("plan"))
        # Lanes get their third page with 33 entries: at 32 and 30 before the new one.
        assert planned == [1, 1, 1, 2, 2, 3, 3, 3, 3]
        assert library.count("__init__") == 1

    def test_other_pages_of_the_same_number_need_no_plan(self, library):
        backend = FlashInferBackend(library)
        for seed in range(3):
            batch = batch_with([1, 4], [[20, 20], [33, 33]], seed=seed)
            check(backend, batch, 2)
        assert library.count("plan") == 2

    def test_each_of_several_plans_is_found_again(self, library):
        """Whichever layer it is for then."""
        backend = FlashInferBackend(library)
        for lanes in ([20, 7], [7, 20], [21, 8]):
            check(backend, batch_with([1], [lanes]), 2)
        assert library.count("plan") == 2

    def test_a_wrapper_is_used_again_for_requests_it_has_room_for(self, library):
        backend = FlashInferBackend(library)
        for rows in (16, 9, 12):
            check(backend, batch_with([rows], [[20, 20]]), 2)
        assert library.count("__init__") == 1 and library.count("plan") == 3
        check(backend, batch_with([17], [[20, 20]]), 2)
        assert library.count("__init__") == 2

    def test_no_more_wrappers_are_kept_than_may_be(self, library, monkeypatch):
        monkeypatch.setattr(runs, "MOST_RUNS", 2)
        backend = FlashInferBackend(library)
        for count in (1, 2, 3, 1):
            check(backend, batch_with([1] * count, [[20, 20]] * count), 1)
        assert library.count("__init__") == 4 and len(backend._runs._runs) == 2

    def test_layers_of_too_many_lengths_are_tritons(self, library, monkeypatch):
        monkeypatch.setattr(shares, "MOST_SHAPES", 1)
        batch = batch_with([1, 1, 4], [[20, 7], [33, 33], [40, 40]])
        check(FlashInferBackend(library), batch, 3)
        assert [part.share.sequences.tolist() for part in batch.plan.parts] == [[1], [2]]
        assert [members.sequences.tolist() for members in batch.plan.members] == [[0]]


def splits(library):
    """Whether chunks were planned with lanes split, plan by plan."""
    named = [call[3] for call in library.calls if call[:2] == ("BatchPrefillWithPagedKVCacheWrapper", "plan")]
    return [not given["disable_split_kv"] for given in named]


def test_lanes_are_split_for_few_rows_where_the_workspace_has_room(library, monkeypatch):
    batch = batch_with([64, 65], [[20, 20]] * 2)
    check(FlashInferBackend(library), batch, 2)
    assert splits(library) == [True, False]
    monkeypatch.setattr(runs, "WORKSPACE_BYTES", 1 << 23)
    check(FlashInferBackend(library), batch, 2)
    assert splits(library) == [True, False, False, False]


def test_more_rows_want_more_of_the_workspace(monkeypatch):
    monkeypatch.setattr(runs, "WORKSPACE_BYTES", 128 << 20)
    assert runs.may_split(2048 * 8, 8 * 32, 4, 128) and not runs.may_split(8192 * 8, 8 * 128, 4, 128)
    assert not runs.may_split(2048 * 8, 8 * 32, 8, 256)


class TestFallingBack:
    """What FlashInfer cannot take is Triton's, which is said once."""

    @pytest.mark.parametrize(
        ("options", "queries", "words"),
        [
            ({"dtype": torch.int8}, torch.float16, "it reads a KV cache in float16 or bfloat16, not int8"),
            ({"dtype": torch.float32}, torch.float32, "KV cache in float16 or bfloat16, not float32"),
            ({"dtype": torch.float16}, torch.float32, "takes queries in float16 or bfloat16, not float32"),
            ({"head_dim": 96}, torch.float16, "its head sizes are 64, 128, 256, not 96"),
        ],
    )
    def test_what_it_has_no_kernel_for(self, options, queries, words, caplog):
        library = Recording(documented())
        backend = FlashInferBackend(library)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                batch = batch_with([1, 6], [[33, 0], [20, 70]], **options)
                qkv = random_rows(batch, 3).to(torch.bfloat16).to(queries)
                _, out, _ = run(backend, batch, qkv, 1)
                _, expected, _ = run(ReferenceBackend(), batch, qkv.float(), 1)
                torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        assert not library.calls
        (record,) = caplog.records
        assert words in record.message and record.message.endswith("Triton's kernels are.")

    def test_a_plan_that_fails_is_not_tried_again(self, caplog):
        class Failing:
            def plan(self, *given, **named):
                tried.append(1)
                raise RuntimeError("Ninja build failed.\nand much more")

        tried = []
        library = documented()
        library.BatchDecodeWithPagedKVCacheWrapper = lambda *_, **__: Failing()
        backend = FlashInferBackend(library)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                batch = batch_with([1, 6], [[33, 0], [20, 70]])
                _, out, _ = run(backend, batch, random_rows(batch, 3).half())
                assert torch.isfinite(out).all()
        (record,) = caplog.records
        assert "it cannot plan (RuntimeError: Ninja build failed.)" in record.message
        assert tried == [1]

    @pytest.mark.parametrize("number", range(6))
    def test_a_run_that_fails_is_computed_again_by_triton(self, number, caplog):
        """Whichever of a layer's parts it is of, also where Triton has read only the beginnings of lanes."""
        lengths, masses = [[60, 50], [80, 70], [9, 0]], {0: 12, 1: 20}
        fault = RuntimeError("an illegal instruction was encountered\nand much more")
        library = Recording(documented(), {"run": (number, fault)})
        backend = FlashInferBackend(library)
        with caplog.at_level(logging.WARNING):
            compare(backend, batch_with([1, 6, 1], lengths, masses), 3)
            compare(backend, batch_with([1, 6, 1], lengths, masses, seed=1), 3)
        (record,) = caplog.records
        assert "it cannot run (RuntimeError: an illegal instruction was encountered)" in record.message
        assert library.count("run") == number + 1

    @pytest.mark.parametrize("method", ["plan", "run"])
    @pytest.mark.parametrize(
        "error", [torch.OutOfMemoryError("20.00 MiB"), MemoryError()], ids=["device", "host"]
    )
    def test_memory_that_is_short_is_no_reason_to_give_it_up(self, method, error, caplog):
        library = Recording(documented(), {method: (1, error)})
        backend = FlashInferBackend(library)
        with pytest.raises(type(error)) as caught:
            compare(backend, batch_with([1, 6], [[33, 0], [20, 70]]), 3)
        assert caught.value is error and not caplog.records
        check(backend, batch_with([1, 6], [[33, 0], [20, 70]], seed=1), 3)


def test_every_call_is_one_that_the_installed_package_takes():
    flashinfer = pytest.importorskip(
        "flashinfer", reason="flashinfer is not installed (pip install 'minikv[flashinfer]')"
    )
    library = Recording(documented())
    backend = FlashInferBackend(library)
    check(backend, batch_with([1, 6, 70, 1], [[60, 50], [80, 70], [40, 31], [9, 0]], {0: 12, 1: 20}), 3)
    assert {method for _, method, _, _ in library.calls} == {"__init__", "plan", "run"}
    for name, method, given, named in library.calls:
        wrapper = getattr(flashinfer, name)
        inspect.signature(getattr(wrapper, method)).bind(wrapper, *given, **named)
        if (name, method) == ("BatchDecodeWithPagedKVCacheWrapper", "plan"):
            # The public one takes any named argument and hands it on.
            inspect.signature(wrapper._plan_impl).bind(wrapper, *given, **named)
