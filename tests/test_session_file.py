"""Saved sessions: another process goes on as this one would have, and computes nothing again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_tools import ROOT, write_tiny_model
from safetensors import safe_open
from session_tools import MORE, PARAMS, QUESTIONS, begun, held, keep, load, more, named

from minikv import LLM, CacheConfig, ConfigError, SamplingParams, SessionError, TierConfig
from minikv.sessions.container import Unusable
from minikv.sessions.plain import cache_of, plain_cache

CACHES = [
    None,
    keep("window", 40),
    keep("snapkv", 40),
    keep("snapkv", 40, refit=True),
    keep("adakv", 0.3, decode_slack=3),
    keep("expected", 40, prefill="streaming"),
    keep("compresskv", 40),
    keep("adakv:expected", 0.3, prefill="streaming", decode_slack=2),
    keep("adakv:compresskv", 40),
    keep("gracekv", 40),
    keep("gracekv", 0.3, decode_slack=3),
    keep("gracekv", "80KiB", prefill="streaming"),
    keep("snapkv", "100KiB"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


@pytest.fixture(scope="module")
def one(model):
    with load(model) as llm:
        yield llm


@pytest.fixture(scope="module")
def other(model):
    with load(model) as llm:
        yield llm


@pytest.mark.filterwarnings("ignore:compresskv has no calibration profile")
@pytest.mark.parametrize("cache", CACHES, ids=named)
def test_a_loaded_session_goes_on_with_the_same_tokens_and_computes_nothing_again(
    one, other, tmp_path, cache
):
    session = begun(one, cache)
    session.save(tmp_path / "s")
    loaded = other.load_session(tmp_path / "s")
    other.engine.store.check()
    assert loaded.messages == session.messages
    assert (loaded.cache.policy, loaded.cache.budget) == (session.cache.policy, session.cache.budget)
    assert (loaded.num_tokens, loaded.kv_entries.tolist()) == (
        session.num_tokens,
        session.kv_entries.tolist(),
    )
    assert loaded.kv_map().tolist() == session.kv_map().tolist()
    assert all(np.array_equal(a, b) for a, b in zip(held(session), held(loaded), strict=True))
    known = session.num_tokens
    expected = more(session)
    assert more(loaded) == expected
    assert expected[0][1] == known > 100
    assert held(loaded)[-1].tolist() == held(session)[-1].tolist()
    for closed in (session, loaded):
        closed.close()
    other.engine.store.check()
    assert other.kv_bytes_in_use == 0


@pytest.mark.parametrize("cache", [None, keep("snapkv", 40, decode_slack=2), keep("gracekv", 40)], ids=named)
def test_the_last_question_is_answered_again_without_a_row_after_loading(one, other, tmp_path, cache):
    session = begun(one, cache)
    session.save(tmp_path / "s")
    loaded = other.load_session(tmp_path / "s")
    hot = SamplingParams(temperature=3.0, seed=5, max_tokens=9, ignore_eos=True)
    replies = [list(s.regenerate(hot))[-1].result for s in (session, loaded)]
    assert replies[0].token_ids == replies[1].token_ids
    assert replies[0].usage == replies[1].usage
    assert more(session) == more(loaded)
    session.close()
    loaded.close()


@pytest.mark.parametrize("cache", [keep("snapkv", 40, decode_slack=2), keep("gracekv", 40)], ids=named)
def test_a_question_in_the_place_of_one_that_was_saved_is_answered_as_before(one, other, tmp_path, cache):
    session = begun(one, cache)
    session.save(tmp_path / "s")
    loaded = other.load_session(tmp_path / "s")
    for changed in (session, loaded):
        changed.set_messages(changed.messages[:3])
    assert more(session) == more(loaded)
    session.close()
    loaded.close()


def test_lanes_given_up_after_loading_are_computed_again_along_the_saved_course(one, model, tmp_path):
    session = begun(one, keep("snapkv", 40, decode_slack=3))
    session.save(tmp_path / "s")
    expected = more(session)
    session.close()
    with load(model, max_seqs=1) as llm:
        loaded = llm.load_session(tmp_path / "s")
        llm.generate("Something else", PARAMS)
        assert loaded.num_tokens == 0
        tokens = more(loaded)
        assert [said for said, _ in tokens] == [said for said, _ in expected]
        assert tokens[0][1] == 0
        # And lanes that are not there are saved as such.
        llm.generate("Something else", PARAMS)
        loaded.save(tmp_path / "without")
        again = llm.load_session(tmp_path / "without")
        assert again.send("Third", PARAMS).token_ids == loaded.send("Third", PARAMS).token_ids


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "backends", [("torch", "reference"), ("cpu", "torch"), ("torch", "cpu")], ids="-".join
)
def test_a_session_moves_between_backends_and_sizes_of_pages(model, tmp_path, dtype, backends):
    caches = [keep("gracekv", 40, kv_dtype=dtype), CacheConfig(kv_dtype=dtype)]
    sizes = [{"cpu": None, "torch": 8, "reference": 16}[name] for name in backends]
    config = [CacheConfig(kv_dtype=dtype, page_size=size) for size in sizes]
    with (
        load(model, cache=config[0], backend=backends[0]) as a,
        load(model, cache=config[1], backend=backends[1]) as b,
    ):
        for cache in caches:
            session = begun(a, cache, QUESTIONS[:1])
            session.save(tmp_path / "s")
            loaded = b.load_session(tmp_path / "s")
            b.engine.store.check()
            assert all(np.array_equal(x, y) for x, y in zip(held(session), held(loaded), strict=True))
            assert loaded.send("And now?", PARAMS).usage.reused_tokens == session.num_tokens
            loaded.save(tmp_path / "back")
            assert a.load_session(tmp_path / "back").num_tokens == loaded.num_tokens


def test_a_session_that_merged_entries_keeps_what_they_stand_for(one, other, tmp_path):
    session = begun(one, keep("gracekv", 40))
    assert int(session.kv_map().max()) > 1
    session.save(tmp_path / "s")
    with safe_open(tmp_path / "s", "pt") as file:
        assert int(file.get_tensor("lanes.counts").max()) == int(session.kv_map().max())
        assert file.metadata()["format"] == "minikv-session"
    assert other.load_session(tmp_path / "s").kv_map().tolist() == session.kv_map().tolist()
    session.close()


def test_a_new_or_cleared_session_and_its_template_arguments_are_saved_too(one, other, tmp_path):
    session = one.chat_session("Be brief.", enable_thinking=False, tools=[{"name": "clock"}])
    session.save(tmp_path / "s")
    loaded = other.load_session(tmp_path / "s")
    assert loaded.messages == [{"role": "system", "content": "Be brief."}]
    assert loaded.template_args == {"enable_thinking": False, "tools": [{"name": "clock"}]}
    assert more(loaded) == more(session)
    session.clear()
    session.save(str(tmp_path / "s"))
    assert other.load_session(str(tmp_path / "s")).num_tokens == 0


def test_strange_text_survives(one, other, tmp_path):
    session = begun(one, None, ['äß\u2028漢字 "quoted" \\ \x00\x1b\ufdd0 \U0001f600'])
    session.save(tmp_path / "s")
    loaded = other.load_session(tmp_path / "s")
    assert loaded.messages == session.messages
    assert more(loaded) == more(session)


def test_a_session_is_saved_over_itself_and_by_a_link_and_leaves_no_other_file(one, other, tmp_path):
    session = begun(one, None, QUESTIONS[:1])
    (tmp_path / "link").symlink_to(tmp_path / "s")
    session.save(tmp_path / "s")
    session.send("Go on", PARAMS)
    session.save(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["link", "s"]
    assert (tmp_path / "link").is_symlink()
    assert len(other.load_session(tmp_path / "s").messages) == 5
    session.close()


def test_a_session_is_not_saved_in_a_turn_nor_by_another_llm(one, other, tmp_path):
    session = begun(one, None, QUESTIONS[:1])
    stream = session.stream("Go on", PARAMS)
    next(stream)
    with pytest.raises(ConfigError, match="middle of a turn"):
        session.save(tmp_path / "s")
    list(stream)
    with pytest.raises(ConfigError, match="another LLM"):
        other.save_session(session, tmp_path / "s")
    session._messages[0]["tool"] = object()
    with pytest.raises(SessionError, match="not plain data"):
        session.save(tmp_path / "s")
    assert not os.listdir(tmp_path)
    session.close()


def test_a_dropped_loaded_session_gives_its_pages_back(one, other, tmp_path):
    begun(one).save(tmp_path / "s")
    other.load_session(tmp_path / "s")
    other.generate("x", PARAMS)
    assert other.kv_bytes_in_use == 0


GO_ON = """
import json, sys
from minikv import LLM, SamplingParams, TierConfig
model, path, hot, options, questions, count = sys.argv[1:]
params = SamplingParams(max_tokens=int(count), ignore_eos=True)
with LLM(model, tiers=TierConfig(hot=hot), **json.loads(options)) as llm:
    session = llm.load_session(path)
    replies = [session.send(question, params) for question in json.loads(questions)]
    print(json.dumps([[list(r.token_ids), r.usage.reused_tokens] for r in replies]))
"""


def go_on_elsewhere(model: object, path: Path, hot: str, options: dict, questions, count: int) -> list:
    """`more` in a process of its own."""
    arguments = [str(model), str(path), hot, json.dumps(options), json.dumps(questions), str(count)]
    done = subprocess.run(
        [sys.executable, "-c", GO_ON, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_another_process_goes_on_with_the_same_tokens(one, model, tmp_path):
    session = begun(one, keep("gracekv", 40, decode_slack=3))
    session.save(tmp_path / "s")
    expected = [[list(tokens), reused] for tokens, reused in more(session)]
    options = {"backend": "torch", "threads": 1}
    assert go_on_elsewhere(model, tmp_path / "s", "4MiB", options, MORE, 9) == expected
    session.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache", [None, keep("snapkv", 0.2), keep("gracekv", 0.2, decode_slack=8)], ids=named
)
def test_another_process_goes_on_with_the_built_in_model(smollm_path, tmp_path, cache):
    text = (ROOT / "examples" / "data" / "lighthouse.txt").read_text(encoding="utf-8")
    options = {"weights": "f32", "backend": "torch"}
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM(str(smollm_path), tiers=TierConfig(hot="256MiB"), **options) as llm:
        session = llm.chat_session(cache=cache)
        session.send(f"{text[:3000]}\n\nWhat is it about?", params)
        session.save(tmp_path / "s")
        known = session.num_tokens
        replies = [session.send(question, params) for question in MORE]
    expected = [[list(r.token_ids), r.usage.reused_tokens] for r in replies]
    assert expected[0][1] == known
    assert go_on_elsewhere(smollm_path, tmp_path / "s", "256MiB", options, MORE, 16) == expected


@pytest.mark.parametrize("router", ["none", "shipped", None])
def test_what_stands_in_the_place_of_a_routers_path_is_no_file(router, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = CacheConfig(policy="sekv", budget=60, profile=router)
    assert cache_of(json.loads(json.dumps(plain_cache(cache)))) == cache


def test_a_profile_that_is_gone_is_named():
    for policy, profile in (("sekv", "router.safetensors"), ("compresskv", "none")):
        fields = plain_cache(CacheConfig(policy=policy, budget=60, profile=profile))
        with pytest.raises(Unusable, match=f"calibration profile .*{profile}, which is not there any more"):
            cache_of(json.loads(json.dumps(fields)))
