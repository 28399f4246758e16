"""Compression from text to text: requests, conversations, profiles and what is pinned."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from cli_tools import write_tiny_model

from minikv import LLM, CacheConfig, ConfigError, RequestError, SamplingParams, TierConfig
from minikv.jobs import Job
from minikv.text.spans import content_end, system_end

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
WORDS = "The keeper climbed the stairs at dusk and wrote a number in the log. "
KEEP = CacheConfig(policy="snapkv", budget=0.3, sinks=2, recent=4, window=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=4096))


@pytest.fixture(scope="module")
def llm(model_dir):
    with LLM(model_dir, tiers=TierConfig(hot="16MiB")) as llm:
        yield llm


@pytest.fixture(scope="module")
def keeping(model_dir):
    with LLM(model_dir, cache=KEEP, tiers=TierConfig(hot="16MiB")) as llm:
        yield llm


def test_an_llm_keeps_what_its_cache_says_and_a_request_what_its_own_says(llm, keeping):
    prompt = WORDS * 6
    full, kept = llm.generate(prompt, SHORT)[0], keeping.generate(prompt, SHORT)[0]
    assert kept.kv.bytes < 0.6 * kept.kv.full_bytes
    assert full.kv.bytes == full.kv.full_bytes == kept.kv.full_bytes
    assert full.timings.compress_s == 0 < kept.timings.compress_s < kept.timings.prefill_s
    # Not the kept bytes alone: the same tokens come out either way.
    assert llm.generate(prompt, SHORT, cache=KEEP)[0].token_ids == kept.token_ids
    assert keeping.generate(prompt, SHORT, cache=CacheConfig())[0].token_ids == full.token_ids
    assert list(llm.stream(prompt, SHORT, cache=KEEP))[-1].result.kv == kept.kv


def test_chats_and_jobs_may_keep_each_their_own(llm):
    messages = [{"role": "user", "content": WORDS * 6}]
    kept = llm.chat(messages, SHORT, cache=KEEP)
    assert kept.kv.bytes < kept.kv.full_bytes
    assert list(llm.stream_chat(messages, SHORT, cache=KEEP))[-1].result.token_ids == kept.token_ids
    jobs = [
        Job("full", messages=messages, params=SHORT),
        Job("kept", messages=messages, params=SHORT, cache=KEEP),
        Job("tight", messages=messages, params=SHORT, cache=CacheConfig(policy="window", budget="1KiB")),
    ]
    results = {job.key: result for job, result in llm.run(jobs)}
    assert results["full"].kv.bytes == results["full"].kv.full_bytes
    assert results["kept"].token_ids == kept.token_ids
    assert results["tight"].finish_reason == "error"
    assert "needs at least" in results["tight"].message


def test_a_budget_that_cannot_hold_is_refused_at_load(model_dir):
    with pytest.raises(ConfigError, match="needs at least"):
        LLM(model_dir, cache=CacheConfig(policy="window", budget="1KiB"), tiers=TierConfig(hot="4MiB"))


def test_storage_is_chosen_at_load_only(llm):
    (result,) = llm.generate("x", SHORT, cache=CacheConfig(kv_dtype="int8"))
    assert result.finish_reason == "error"
    assert "was loaded with" in result.message


# Which tokens are content, and which are the system message's

TEMPLATES = {
    "plain": None,
    "stripping": (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} [end]\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    ),
    "system first": (
        "{% if messages[0]['role'] == 'system' %}<<{{ messages[0]['content'] }}>>{% endif %}"
        "{% for m in messages if m['role'] != 'system' %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}
CHATS = [
    [{"role": "user", "content": "Hello there"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  assistant\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Hello"},
    ],
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_the_users_words_end_before_what_the_template_adds(llm, template, messages, monkeypatch):
    from minikv.text.template import ChatTemplate

    tokenizer = llm.tokenizer
    if TEMPLATES[template]:
        monkeypatch.setitem(tokenizer._templates, "default", ChatTemplate(TEMPLATES[template]))
    ids = tokenizer.encode_rendered(tokenizer.render_chat(messages))
    end = content_end(tokenizer, messages, ids)
    text = messages[-1]["content"]
    text = text if isinstance(text, str) else text[0]["text"]
    assert tokenizer.decode(ids[:end], skip_special=False).rstrip().endswith(text.strip())
    start = system_end(tokenizer, messages, ids)
    if messages[0]["role"] == "system":
        assert tokenizer.decode(ids[:start], skip_special=False).endswith("Be brief.")
    else:
        assert start == 0


def test_a_template_that_hides_the_end_leaves_the_whole_prompt_as_content(llm, monkeypatch):
    from minikv.text.template import ChatTemplate

    messages = CHATS[0]
    monkeypatch.setitem(
        llm.tokenizer._templates, "default", ChatTemplate("{{ messages[0]['content'] | length }} characters")
    )
    ids = llm.tokenizer.encode_rendered(llm.tokenizer.render_chat(messages))
    assert content_end(llm.tokenizer, messages, ids) is None
    assert content_end(llm.tokenizer, [], ids) is None
    assert content_end(llm.tokenizer, [{"role": "assistant", "tool_calls": [1]}], ids) is None
    assert llm.chat(messages, SHORT, cache=KEEP).finish_reason == "length"


def test_the_observation_window_leaves_the_templates_suffix_out(llm):
    engine, seen = llm.engine, []
    compressor = engine._compressor
    engine._compressor = type("Spy", (), {"compress": staticmethod(_spy(compressor.compress, seen))})()
    try:
        messages = [{"role": "user", "content": WORDS * 4}]
        ids = llm.encode_chat(messages)
        suffix = len(llm.tokenizer.encode_rendered("<|im_end|>\n<|im_start|>assistant\n"))
        llm.chat(messages, SHORT, cache=KEEP)
    finally:
        engine._compressor = compressor
    assert seen == [list(range(len(ids) - suffix - 8, len(ids) - suffix))]


def _spy(compress, seen):
    def watched(*arguments):
        seen.append(arguments[4].query_positions.tolist())
        return compress(*arguments)

    return watched


# Conversations


def test_a_session_compresses_every_turn_and_pins_its_system_message(llm):
    session = llm.chat_session("You are a lighthouse keeper of few words.", cache=KEEP)
    assert session.cache is KEEP
    for turn in range(4):
        session.send(f"{WORDS * 2} Turn {turn}?", SHORT)
    tokens, entries = session.num_tokens, session.kv_entries
    assert int(entries.max()) < 0.5 * tokens
    assert session.kv_bytes < 0.6 * llm.full_kv_bytes(tokens)
    held = session.kv_map()
    assert held.shape == (*entries.shape, tokens)
    assert torch.equal(held.sum(-1), entries.long())
    system = system_end(llm.tokenizer, session.messages, session._ids)
    assert system > 10
    assert held[..., :system].all()
    assert not held.all()
    session.clear()
    assert session.kv_map().shape == (*entries.shape, 0)
    session.close()


def test_a_session_of_an_llm_that_keeps_all_holds_every_token(llm):
    with llm.chat_session("Be brief.") as session:
        session.send("Hello", SHORT)
        assert session.kv_map().all()
        assert session.kv_map().shape[-1] == session.num_tokens


def test_tokens_pinned_by_the_configuration_take_the_place_of_the_system_message(llm):
    cache = CacheConfig(policy="window", budget=20, sinks=1, recent=4, window=4, pinned=((6, 9),))
    with llm.chat_session("You are a lighthouse keeper of few words.", cache=cache) as session:
        for _ in range(3):
            session.send(WORDS, SHORT)
        held = session.kv_map()
        assert held[..., [0, 6, 7, 8]].all()
        assert not held[..., 1:6].any()


def test_a_reply_can_be_said_again_under_a_policy(llm):
    with llm.chat_session(cache=KEEP) as session:
        session.send(WORDS * 4, SHORT)
        again = list(session.regenerate(SHORT))[-1].result
        assert again.finish_reason == "length"
        assert len(session.messages) == 2
        session.send("Go on", SHORT)


@pytest.mark.parametrize("policy", ["snapkv", "adakv", "expected"])
def test_forty_turns_stay_under_a_byte_budget_at_every_step_and_answer_to_the_end(model_dir, policy):
    limit = 160 << 10
    cache = CacheConfig(policy=policy, budget=f"{limit}B", prefill="streaming")
    with LLM(model_dir, cache=cache, tiers=TierConfig(hot="1MiB")) as llm:
        session = llm.chat_session("Be brief.")
        for turn in range(40):
            for _ in session.stream(f"Turn {turn}: what did the keeper write?", SHORT):
                assert llm.kv_bytes_in_use <= limit
            assert session.messages[-1]["role"] == "assistant"
        assert session.num_tokens > 1500
        assert llm.full_kv_bytes(session.num_tokens) > 3 * limit
        session.close()


def test_without_a_policy_the_same_pool_ends_the_conversation_with_a_hint(model_dir):
    with LLM(model_dir, tiers=TierConfig(hot="160KiB")) as llm:
        session = llm.chat_session("Be brief.")
        results = []
        while not results or results[-1].finish_reason != "context":
            before = session.messages
            results.append(session.send(f"Turn {len(results)}: what did the keeper write?", SHORT))
        assert len(results) < 40
        assert "--kv-policy" in results[-1].message
        if not results[-1].token_ids:
            assert session.messages == before
        with pytest.raises(RequestError, match="--kv-policy"):
            list(llm.stream(WORDS * 20, SHORT))


# Profiles


def test_compresskv_without_a_profile_says_so_once(model_dir):
    cache = CacheConfig(policy="compresskv", budget=0.3)
    with pytest.warns(UserWarning, match="no calibration profile for .*minikv calibrate"):
        llm = LLM(model_dir, cache=cache, tiers=TierConfig(hot="4MiB"))
    with llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(WORDS * 3, SHORT)
        llm.generate(WORDS * 3, SHORT, cache=CacheConfig(policy="adakv:compresskv", budget=0.2))


def test_a_profile_that_is_none_is_refused_at_load(model_dir, tmp_path):
    bad = tmp_path / "profile.safetensors"
    bad.write_text(json.dumps({"not": "a profile"}))
    for path in (bad, tmp_path / "missing"):
        cache = CacheConfig(policy="compresskv", budget=0.3, profile=str(path))
        with pytest.raises(ConfigError, match=path.name):
            LLM(model_dir, cache=cache, tiers=TierConfig(hot="4MiB"))


# The real model


@pytest.mark.slow
def test_compressing_a_long_prompt_frees_pages_and_memory(smollm_path):
    from pathlib import Path

    from minikv.memory import available_bytes

    assert available_bytes() > 1 << 30

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    cache = CacheConfig(policy="snapkv", budget=0.05)
    with LLM(str(smollm_path), tiers=TierConfig(hot="512MiB"), max_context=6100) as llm:
        ids = llm.encode_prompt(WORDS * 500)[:6000]
        store = llm.engine.store
        full = llm.full_kv_bytes(6000)
        llm.generate([ids[:600]], SHORT, cache=cache)  # what the process takes beside the pool
        before, peak = resident(), 0
        (request,) = llm.engine.add(ids, SamplingParams(max_tokens=3, ignore_eos=True), cache=cache)
        while not any(event.request_id == request for event in llm.engine.step()):
            peak = max(peak, resident())
        store.check()
        held = store.pool.bytes_in_use
        assert held <= 0.05 * full + store.num_lanes * store.pool.page_bytes
        assert peak - before > 0.8 * full
        assert resident() - before < 0.25 * full
        (result,) = llm.generate([ids[1000:5000]], SHORT)
        assert result.finish_reason == "length"
