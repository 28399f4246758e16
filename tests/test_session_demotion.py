"""Sessions whose entries were demoted: the file holds them too."""

from __future__ import annotations

import re

import pytest
from cli_tools import write_tiny_model
from session_tools import begun, keep, load, more

from minikv import SessionError, TierConfig
from minikv.cli.chat_files import loaded
from minikv.cli.tier_lines import tier_lines

TIERS = TierConfig(hot="4MiB", warm="16MiB")
CACHES = [keep(name, 24, evicted="demote") for name in ("snapkv", "expected", "gracekv")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.policy)
def test_a_loaded_session_chooses_again_among_all_that_was_demoted(model, tmp_path, cache):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = begun(one, cache)
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        restored = other.engine.scheduler
        assert more(loaded) == more(session)
        assert restored.num_restored == 2
        loaded.close()
        assert other.engine.storage.tiers.nbytes == 0


def test_a_chat_says_what_its_tiers_hold_and_what_it_saves(model, tmp_path):
    with load(model, tiers=TIERS) as llm:
        session = begun(llm, CACHES[0])
        assert 0 < session.kv_bytes < session.demoted_bytes == llm.tier_stats["warm_bytes"]
        assert re.search(r"\([0-9.]+ KiB and [0-9.]+ KiB demoted\)", loaded(session, tmp_path))
        more(session)
        lines = tier_lines(llm)
        assert lines[0].startswith("warm tier: ") and len(lines) == 2
        assert "turns begun with all that was demoted" in lines[1]


def test_a_session_saved_while_its_lanes_were_given_up_computes_nothing_again(model, tmp_path):
    with load(model, tiers=TIERS) as one, load(model, tiers=TIERS) as other:
        session = begun(one, CACHES[0])
        one.engine.scheduler._reclaim(session._lanes)
        session.save(tmp_path / "s")
        loaded = other.load_session(tmp_path / "s")
        assert more(loaded) == more(session)


def test_without_room_for_what_was_demoted_nothing_is_loaded(model, tmp_path):
    with load(model, tiers=TIERS) as one:
        begun(one, CACHES[0]).save(tmp_path / "s")
    with load(model, tiers=TierConfig(hot="4MiB", warm="2KiB")) as other:
        with pytest.raises(SessionError, match="no room; raise --kv-warm"):
            other.load_session(tmp_path / "s")
        assert other.kv_bytes_in_use == 0 and other.engine.storage.tiers.nbytes == 0
    with load(model) as other, pytest.raises(SessionError, match="needs a tier below the pool"):
        other.load_session(tmp_path / "s")
