"""The output file of a batch: whole lines, one writer, nothing torn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minikv.cli.batch_output import OutputFile
from minikv.cli.console import OutputError


def test_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = b'{"id": "a", "custom_id": null, "error": null}\n'
    for torn in (b"", b"{", whole[:-1], b"\0" * 20):
        path.write_bytes(whole + torn)
        with OutputFile(path) as file:
            (line,) = file.recover(drop_failed=False)
        assert (line.id, line.failed) == ("a", False)
        assert path.read_bytes() == whole


def test_line_separators_of_unicode_do_not_end_an_output_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    line = {"id": "a", "custom_id": "b", "error": {"message": "a\u2028b\u2029c\x85d\ne\ud800"}}
    with OutputFile(path) as file:
        file.write(line)
    (text,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(text) == line


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl"), pytest.raises(OutputError, match="Another run is writing"):
        OutputFile(tmp_path / "out.jsonl")


def test_part_of_a_line_is_taken_back_when_the_disk_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    with OutputFile(path) as file:
        file.write({"id": "first"})
        whole = path.read_bytes()
        real = file._file

        class NearlyFull:
            """Takes five bytes, then none."""

            taken = False

            def write(self, data: bytes) -> int:
                if self.taken:
                    raise OSError(28, "No space left on device")
                self.taken = True
                return real.write(data[:5])

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(file, "_file", NearlyFull())
        with pytest.raises(OutputError, match="no space left on device"):
            file.write({"id": "second"})
    assert path.read_bytes() == whole
