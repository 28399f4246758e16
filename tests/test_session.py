"""ChatSession: turns reuse what is computed, and nothing is lost when a turn fails."""

from __future__ import annotations

import gc
from itertools import islice

import pytest
from cli_tools import write_tiny_model

from minikv import LLM, CacheConfig, ConfigError, RequestError, SamplingParams, TemplateError, TierConfig
from minikv.cache.lanes import LaneStore

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512))


@pytest.fixture
def llm(model_dir):
    with LLM(model_dir, tiers=TierConfig(hot="4MiB")) as llm:
        yield llm


def end_turn(llm) -> SamplingParams:
    """Parameters with which the model ends its turn at once."""
    return SamplingParams(logit_bias={llm.tokenizer.encode_rendered("<|im_end|>")[0]: 1000.0})


def test_later_turns_compute_only_what_is_new(llm):
    session = llm.chat_session(system="Be brief.")
    first = session.send("Hello", SHORT)
    assert first.usage.reused_tokens == 0
    second = session.send("Go on", SHORT)
    # Everything of the first turn but its last token, which was sampled and never computed.
    assert second.usage.reused_tokens == first.usage.prompt_tokens + first.usage.completion_tokens - 1
    third = session.send("And then?", SHORT)
    assert third.usage.reused_tokens == second.usage.prompt_tokens + second.usage.completion_tokens - 1
    assert [m["role"] for m in session.messages] == ["system", *["user", "assistant"] * 3]


def test_a_turn_gives_what_the_whole_conversation_gives_at_once(smollm):
    params = SamplingParams(max_tokens=24)
    session = smollm.chat_session()
    session.send("Name a colour.", params)
    session.send("Name a fruit.", params)
    reply = session.send("Name an animal.", params)
    assert reply.usage.reused_tokens > 50
    whole = smollm.chat(session.messages[:-1], params)
    assert reply.text == whole.text
    session.close()


def test_a_reply_that_ended_itself_is_reused_too(llm):
    session = llm.chat_session()
    first = session.send("Hello", end_turn(llm))
    assert (first.finish_reason, first.text) == ("stop", "")
    second = session.send("Hello again", SHORT)
    assert second.usage.reused_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_regenerate_replaces_the_last_reply_and_reuses_the_question(llm):
    session = llm.chat_session()
    first = session.send("Hello", SHORT)
    again = list(session.regenerate(SHORT))[-1].result
    assert again.text == first.text
    assert again.usage.reused_tokens == first.usage.prompt_tokens - 1
    assert len(session.messages) == 2
    hot = SamplingParams(temperature=2.0, seed=3, max_tokens=8, ignore_eos=True)
    other = list(session.regenerate(hot))[-1].result
    assert session.messages[-1]["content"] == other.text


def test_stopping_a_reply_keeps_what_was_said(llm):
    session = llm.chat_session()
    stream = session.stream("Hello", SamplingParams(max_tokens=200, ignore_eos=True))
    said = "".join(piece.text for piece in islice(stream, 20))
    stream.close()
    assert said
    assert session.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    assert session.send("Go on", SHORT).usage.reused_tokens > 10


def test_stopping_before_a_word_was_said_takes_the_question_back(model_dir):
    with LLM(model_dir, prefill_chunk=4, tiers=TierConfig(hot="4MiB")) as llm:
        session = llm.chat_session(system="Be brief.")
        stream = session.stream("Hello there, how are you?", SHORT)
        next(stream)
        stream.close()
        assert [m["role"] for m in session.messages] == ["system"]
        assert session.send("Hello", SHORT).finish_reason == "length"


def test_a_turn_that_cannot_be_served_leaves_the_conversation_as_it_was(llm):
    session = llm.chat_session()
    session.send("Hello", SHORT)
    before = session.messages
    with pytest.raises(RequestError, match="the context is 512"):
        session.send("long " * 1000, SHORT)
    assert session.messages == before
    assert session.send("Go on", SHORT).usage.reused_tokens > 0


def test_a_stop_string_in_a_reply_leaves_a_consistent_transcript(llm):
    session = llm.chat_session()
    whole = llm.chat([{"role": "user", "content": "Hello"}], SHORT).text
    stop = whole[2:4]
    reply = session.send("Hello", SamplingParams(max_tokens=8, ignore_eos=True, stop=stop))
    assert reply.text == whole[: whole.index(stop)]
    next_turn = session.send("Go on", SHORT)
    assert next_turn.text == llm.chat(session.messages[:-1], SHORT).text


def test_changing_the_system_message_computes_again_and_stays_right(llm):
    session = llm.chat_session(system="Be brief.")
    session.send("Hello", SHORT)
    session.set_system("Be long.")
    reply = session.send("Go on", SHORT)
    assert reply.usage.reused_tokens < 20
    assert reply.text == llm.chat(session.messages[:-1], SHORT).text
    session.set_system(None)
    assert session.messages[0]["role"] == "user"


def test_clear_keeps_the_system_message_and_frees_the_lanes(llm):
    session = llm.chat_session(system="Be brief.")
    session.send("Hello", SHORT)
    assert session.kv_bytes > 0
    assert session.num_tokens > 0
    assert session.kv_entries.unique().tolist() == [session.num_tokens]
    session.clear()
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    assert (session.kv_bytes, session.num_tokens, llm.kv_bytes_in_use) == (0, 0, 0)
    assert not session.kv_entries.any()


def test_messages_can_be_replaced_and_a_bad_replacement_changes_nothing(llm):
    session = llm.chat_session()
    session.send("Hello", SHORT)
    saved = session.messages
    other = llm.chat_session()
    other.set_messages(saved)
    assert other.send("Go on", SHORT).text == session.send("Go on", SHORT).text
    with pytest.raises(TemplateError, match="system message must come first"):
        session.set_messages([{"role": "user", "content": "x"}, {"role": "system", "content": "late"}])
    assert len(session.messages) == 4


def test_sessions_share_a_small_pool_and_stay_right(model_dir):
    with LLM(model_dir, max_seqs=2, tiers=TierConfig(hot="300KiB")) as llm:
        sessions = [llm.chat_session(system=f"Number {i}.") for i in range(4)]
        for turn in range(3):
            for session in sessions:
                reply = session.send(f"Turn {turn}", SHORT)
                # A random model says half characters, so the ids and not the text are compared.
                asked = session._ids[: -len(reply.token_ids)]
                assert reply.token_ids == llm.generate(asked, SHORT)[0].token_ids
        assert llm.engine.scheduler.num_reclaimed > 0


def test_a_second_turn_while_one_is_streaming_is_refused(llm):
    session = llm.chat_session()
    stream = session.stream("Hello", SHORT)
    next(stream)
    with pytest.raises(ConfigError, match="middle of a turn"):
        session.send("Impatient", SHORT)
    for change in (session.clear, lambda: session.set_system("x"), lambda: session.set_messages([])):
        with pytest.raises(ConfigError, match="middle of a turn"):
            change()
    assert list(stream)[-1].finish_reason == "length"
    assert [m["role"] for m in session.messages] == ["user", "assistant"]


def test_of_two_streams_begun_the_second_is_refused_and_no_turn_is_lost(llm):
    session = llm.chat_session()
    first, second = session.stream("one", SHORT), session.stream("two", SHORT)
    next(first)
    with pytest.raises(ConfigError, match="middle of a turn"):
        next(second)
    list(first)
    list(session.stream("two", SHORT))
    assert [m["content"] for m in session.messages[::2]] == ["one", "two"]


def test_closing_a_session_in_a_turn_ends_the_turn_and_hides_no_error(llm):
    def fail():
        with llm.chat_session() as session:
            for _ in session.stream("Hello", SHORT):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert llm.kv_bytes_in_use == 0


def test_closing_the_llm_in_a_turn_leaves_a_session_that_says_so(model_dir):
    llm = LLM(model_dir, tiers=TierConfig(hot="4MiB"))
    session = llm.chat_session()
    stream = session.stream("Hello", SHORT)
    next(stream)
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        list(stream)
    session.clear()
    with pytest.raises(ConfigError, match="closed"):
        session.send("Hello", SHORT)
    session.close()


def test_a_system_message_that_is_no_text_is_refused_at_once(llm):
    with pytest.raises(ConfigError, match="must be text"):
        llm.chat_session(system=5)


def test_a_dropped_session_gives_its_pages_back(llm):
    session = llm.chat_session()
    session.send("Hello", SHORT)
    del session
    gc.collect()
    llm.generate("x", SHORT)
    assert llm.kv_bytes_in_use == 0
    with llm.chat_session() as session:
        session.send("Hello", SHORT)
    assert llm.kv_bytes_in_use == 0


def test_there_is_nothing_to_regenerate_at_the_start(llm):
    with pytest.raises(ConfigError, match="say something first"):
        list(llm.chat_session().regenerate())


def test_thinking_text_stripped_from_history_still_gives_right_replies(model_dir):
    """A template that drops part of earlier replies makes the tokens differ from the text."""
    from minikv.text.template import ChatTemplate

    source = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'][2:] if m['role'] == 'assistant' else m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with LLM(model_dir, tiers=TierConfig(hot="4MiB")) as llm:
        llm.tokenizer._templates["default"] = ChatTemplate(source)
        session = llm.chat_session()
        first = session.send("Hello", SHORT)
        second = session.send("Go on", SHORT)
        assert 0 < second.usage.reused_tokens < first.usage.prompt_tokens + 2
        assert second.text == llm.chat(session.messages[:-1], SHORT).text


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("policy", ["gracekv", "snapkv", "sekv"])
def test_a_turn_interrupted_while_lanes_are_rewritten_is_taken_back(model_dir, monkeypatch, policy, turn):
    refit = True if policy == "snapkv" else None
    cache = CacheConfig(policy=policy, budget=40, sinks=2, recent=4, window=6, refit=refit)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    questions = ["one two three four five six " * 4, "eight nine ten " * 4, "twelve " * 3]
    write = LaneStore._write_layer

    def interrupted(store, seq, layer, *rest, **more):
        if layer == 1:
            raise KeyboardInterrupt
        return write(store, seq, layer, *rest, **more)

    with LLM(model_dir, tiers=TierConfig(warm="64MiB"), cache=cache) as llm:
        said = []
        for stopped in (False, True):
            session = llm.chat_session()
            for number, question in enumerate(questions):
                if stopped and number == turn:
                    monkeypatch.setattr(LaneStore, "_write_layer", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        session.send(question, params)
                    monkeypatch.undo()
                session.send(question, params)
            said.append([message["content"] for message in session.messages])
        assert [len(texts) for texts in said] == [6, 6]
        assert not turn or said[0][:2] == said[1][:2]
        llm.engine.store.check()
