"""LLM: text in, text out, on a tiny model directory and on the real small model."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import islice

import pytest
from cli_tools import write_tiny_model

from minikv import LLM, CacheConfig, ConfigError, Job, RequestError, SamplingParams, TierConfig
from minikv.results import Result


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def llm(model_dir):
    with LLM(model_dir, tiers=TierConfig(hot="8MiB")) as llm:
        yield llm


PROMPTS = ["The boat", "a", "Привет, мир", "it was late and the rain had not stopped " * 4]
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


def test_results_keep_the_order_of_the_prompts(llm):
    together = llm.generate(PROMPTS, SHORT)
    single = [llm.generate(p, SHORT)[0] for p in PROMPTS]
    assert [r.token_ids for r in together] == [r.token_ids for r in single]
    assert [r.text for r in together] == [r.text for r in single]


def test_token_id_prompts_equal_text_prompts(llm):
    ids = [llm.tokenizer.encode(p) for p in PROMPTS]
    by_ids, by_text = llm.generate(ids, SHORT), llm.generate(PROMPTS, SHORT)
    assert [r.token_ids for r in by_ids] == [r.token_ids for r in by_text]
    assert llm.generate(ids[0], SHORT)[0].token_ids == llm.generate(PROMPTS[0], SHORT)[0].token_ids


def test_streamed_pieces_join_to_the_generated_text(llm):
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=60, ignore_eos=True)
    for prompt in PROMPTS:
        pieces = list(llm.stream(prompt, params))
        whole = llm.generate(prompt, params)[0]
        assert "".join(p.text for p in pieces) == whole.text
        assert tuple(i for p in pieces for i in p.token_ids) == whole.token_ids
        assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"]
        assert pieces[-1].result.text == whole.text


def test_text_is_the_decoding_of_the_token_ids(llm):
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=80, ignore_eos=True)
    result = llm.generate(PROMPTS[0], params)[0]
    assert result.text == llm.tokenizer.decode(result.token_ids)


def test_usage_kv_and_timings_are_filled_in(llm):
    result = llm.generate(PROMPTS[3], SHORT)[0]
    count = len(llm.tokenizer.encode(PROMPTS[3]))
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (count, 12)
    assert result.kv.bytes == result.kv.full_bytes > 0
    # The last token sampled has no entry; whole pages of every lane are counted.
    pages = -(-(count + 11) // 32) * 4
    assert result.kv.bytes == pages * llm.engine.store.pool.page_bytes
    assert result.timings.load_s > 0
    assert result.timings.prefill_s > 0
    assert llm.kv_bytes_in_use == 0


def test_a_stop_string_ends_the_text_before_it(llm):
    whole = llm.generate(PROMPTS[0], SHORT)[0].text
    stop = whole[3:5]
    cut = whole[: whole.index(stop)]
    result = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True, stop=stop))[0]
    assert (result.text, result.finish_reason) == (cut, "stop")
    streamed = list(llm.stream(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True, stop=[stop])))
    assert "".join(p.text for p in streamed) == cut
    assert streamed[-1].finish_reason == "stop"
    assert llm.kv_bytes_in_use == 0


def test_eos_ends_a_reply_and_is_not_part_of_its_text(llm):
    end = llm.tokenizer.encode_rendered("<|im_end|>")[0]
    result = llm.generate(PROMPTS[0], SamplingParams(logit_bias={end: 1000.0}))[0]
    assert (result.text, result.token_ids, result.finish_reason) == ("", (end,), "stop")
    params = SamplingParams(logit_bias={end: 1000.0}, ignore_eos=True, max_tokens=3)
    ignoring = llm.generate(PROMPTS[0], params)[0]
    assert (ignoring.token_ids, ignoring.finish_reason) == ((end,) * 3, "length")


def test_n_completions_come_as_choices_of_one_result(llm):
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=8, ignore_eos=True)
    result = llm.generate(PROMPTS[3], params)[0]
    assert len(result.choices) == 3
    assert result.choices[0].token_ids == result.token_ids
    for index, choice in enumerate(result.choices):
        seed = SamplingParams(temperature=1.0, seed=7 + index, max_tokens=8, ignore_eos=True)
        assert choice.token_ids == llm.generate(PROMPTS[3], seed)[0].token_ids
    assert result.choices[1].usage.reused_tokens == result.usage.prompt_tokens


def test_logprobs_come_with_every_token(llm):
    result = llm.generate(PROMPTS[0], SamplingParams(max_tokens=5, ignore_eos=True, logprobs=3))[0]
    assert [p.token_id for p in result.logprobs] == list(result.token_ids)
    for entry in result.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)


def test_a_request_that_cannot_be_served_leaves_the_others_alone(llm):
    results = llm.generate([PROMPTS[0], "long " * 4000, PROMPTS[1]], SHORT)
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert "the context is 2048" in results[1].message


def test_a_stream_that_cannot_be_served_raises_one_sentence(llm):
    with pytest.raises(RequestError, match="the context is 2048"):
        list(llm.stream("long " * 4000))


def test_closing_a_stream_aborts_its_request_and_frees_its_pages(llm):
    stream = llm.stream(PROMPTS[3], SamplingParams(max_tokens=500, ignore_eos=True))
    list(islice(stream, 5))
    assert llm.kv_bytes_in_use > 0
    stream.close()
    assert llm.kv_bytes_in_use == 0
    assert llm.generate(PROMPTS[0], SHORT)[0].finish_reason == "length"


def test_streams_can_be_read_in_turns(llm):
    expected = [r.text for r in llm.generate(PROMPTS, SHORT)]
    streams = [llm.stream(p, SHORT) for p in PROMPTS]
    texts = [""] * len(streams)
    alive = set(range(len(streams)))
    while alive:
        for i in sorted(alive):
            piece = next(streams[i], None)
            if piece is None:
                alive.discard(i)
            else:
                texts[i] += piece.text
    assert texts == expected


def test_a_long_prompt_gives_empty_pieces_while_it_is_computed(model_dir):
    with LLM(model_dir, prefill_chunk=16, tiers=TierConfig(hot="8MiB")) as llm:
        first = next(llm.stream(PROMPTS[3], SHORT))
        assert (first.text, first.token_ids) == ("", ())


def test_chat_renders_the_template_and_takes_one_conversation_or_several(llm):
    one = [{"role": "user", "content": "Hello"}]
    result = llm.chat(one, SHORT)
    assert isinstance(result, Result)
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    raw = llm.generate(llm.tokenizer.encode_rendered(rendered), SHORT)[0]
    assert result.token_ids == raw.token_ids
    several = llm.chat([one, [{"role": "user", "content": "Bye"}]], SHORT)
    assert several[0].token_ids == result.token_ids
    assert len(several) == 2


def test_ids_of_any_integer_type_are_taken_and_others_refused(llm):
    import numpy as np

    ids = llm.tokenizer.encode(PROMPTS[0])
    assert llm.generate([np.array(ids)], SHORT)[0].text == llm.generate(PROMPTS[0], SHORT)[0].text
    assert "text or a list of token ids" in llm.generate([[5.0]], SHORT)[0].message


def test_what_finished_in_a_step_is_given_out_before_progress_is_told(llm):
    """A caller that ends the run from `on_progress` must not lose finished results."""
    given, produced = [], 0

    class Enough(Exception):
        pass

    def stop_at_the_end(count):
        nonlocal produced
        produced += count
        if produced == 8:
            raise Enough

    jobs = [Job(i, prompt=PROMPTS[0], params=SamplingParams(max_tokens=2, ignore_eos=True)) for i in range(4)]
    results = llm.run(jobs, on_progress=stop_at_the_end)
    for _ in range(4):
        given.append(next(results)[0].key)
    with pytest.raises(Enough):
        next(results)
    assert given == [0, 1, 2, 3]


def test_a_stream_that_is_told_to_stop_ends_with_a_result(llm):
    pieces = []
    job = Job(0, prompt=PROMPTS[0], params=SamplingParams(max_tokens=50, ignore_eos=True))
    for piece in llm.stream_job(job, should_stop=lambda: len(pieces) >= 5):
        pieces.append(piece)
    result = pieces[-1].result
    assert result.finish_reason == "abort"
    assert result.text == "".join(p.text for p in pieces)
    assert 0 < result.usage.completion_tokens < 10
    assert result.kv.bytes == result.kv.full_bytes > 0


def test_a_model_larger_than_the_free_memory_is_refused(model_dir, monkeypatch):
    from minikv import ModelError

    monkeypatch.setattr("minikv.llm.available_bytes", lambda: 1000)
    with pytest.raises(ModelError, match="for its weights"):
        LLM(model_dir)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_jobs_are_read_only_as_fast_as_they_are_served(model_dir):
    taken = 0

    def jobs():
        nonlocal taken
        for i in range(500):
            taken += 1
            yield Job(i, prompt=PROMPTS[i % 4], params=SamplingParams(max_tokens=2, ignore_eos=True))

    with LLM(model_dir, max_seqs=4, tiers=TierConfig(hot="8MiB")) as llm:
        running = llm.run(jobs())
        list(islice(running, 10))
        assert taken < 30
        running.close()
        assert llm.kv_bytes_in_use == 0


def test_every_job_gives_one_result_whatever_is_wrong_with_it(llm):
    message = [{"role": "user", "content": "x"}]
    jobs = [
        Job("good", prompt="a", params=SHORT),
        Job("both", prompt="a", messages=message),
        Job("neither"),
        Job("role", messages=[{"role": "wizard", "content": "x"}]),
        Job("order", messages=[*message, {"role": "system", "content": "late"}]),
        Job("bias", prompt="a", params=SamplingParams(logit_bias={10**6: 1.0})),
        Job("empty", prompt=[]),
        Job("ids", prompt=["a"]),
        Job("deep", messages=[{"role": "user", "content": "x", "extra": nested(900)}]),
        Job("chat", messages=message, params=SHORT),
    ]
    results = {job.key: result for job, result in llm.run(jobs)}
    assert len(results) == len(jobs)
    bad = {key: r.message for key, r in results.items() if r.finish_reason == "error"}
    assert set(bad) == {"both", "neither", "role", "order", "bias", "empty", "ids", "deep"}
    assert "The system message must come first" in bad["order"]
    assert all("\n" not in message for message in bad.values())


def test_fewer_bits_of_kv_take_fewer_bytes(model_dir):
    used = {}
    for dtype in ("float32", "float16", "int8"):
        with LLM(model_dir, cache=CacheConfig(kv_dtype=dtype), tiers=TierConfig(hot="8MiB")) as llm:
            assert llm.kv_dtype == dtype
            used[dtype] = llm.generate(PROMPTS, SHORT)[0].kv.bytes
    # Positions and masses stay, 8 bytes an entry beside 2 * head_dim values; int8 has two scales.
    assert used["float16"] / used["float32"] == pytest.approx((2 * 16 * 2 + 8) / (2 * 16 * 4 + 8))
    assert used["int8"] / used["float32"] == pytest.approx((2 * 16 + 16) / (2 * 16 * 4 + 8))


def test_the_pool_never_passes_its_ceiling(model_dir):
    with LLM(model_dir, tiers=TierConfig(hot="200KiB")) as llm:
        pool = llm.engine.store.pool
        tensors = (pool.keys, pool.values, pool.log_mass, pool.positions)
        assert sum(t.nbytes for t in tensors) <= 200 * 1024
        results = llm.generate(PROMPTS * 3, SamplingParams(max_tokens=40, ignore_eos=True))
        assert {r.finish_reason for r in results} == {"length"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "cuda"}, "backend must be"),
        ({"device": "tpu"}, "device must be"),
        ({"threads": 0}, "threads must be"),
        ({"threads": 10**6}, "from 1 to 256"),
        ({"max_context": 10**6}, "context of 2048"),
        ({"max_seqs": 0}, "max_seqs must be"),
        ({"max_seqs": 600, "max_batch_tokens": 512}, "max_batch_tokens"),
        ({"prefill_chunk": 600, "max_batch_tokens": 512}, "max_batch_tokens"),
        ({"tiers": TierConfig(hot="900000TiB")}, "could not be allocated"),
        ({"tiers": TierConfig(hot="1KiB")}, "needs at least"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_sentence(model_dir, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(model_dir, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CacheConfig(kv_dtype="int3"),
        lambda: TierConfig(hot="64 bananas"),
        lambda: TierConfig(hot="9" * 400),
        lambda: TierConfig(hot=0),
    ],
)
def test_a_wrong_cache_option_is_refused_when_it_is_made(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "SamplingParams"),
        (lambda llm: llm.generate(["a"], [None]), "must be SamplingParams"),
        (lambda llm: llm.generate(["a"], [SHORT, SHORT]), "as many"),
        (lambda llm: llm.generate(None), "prompts must be"),
        (lambda llm: LLM(None), "model must be"),
    ],
)
def test_arguments_of_the_wrong_type_are_one_sentence(llm, call, words):
    with pytest.raises(ConfigError, match=words):
        call(llm)
    assert llm.kv_bytes_in_use == 0


def test_use_from_two_threads_at_once_is_refused_and_one_after_another_works(llm):
    answers = []

    class Meddling:
        config = llm.engine.model.config

        def forward(self, batch):
            def meddle():
                try:
                    answers.append(llm.generate("b", SHORT))
                except ConfigError as error:
                    answers.append(str(error))

            thread = threading.Thread(target=meddle)
            thread.start()
            thread.join()
            return model.forward(batch)

    model = llm.engine.model
    llm.engine.model = Meddling()
    try:
        llm.generate("a", SamplingParams(max_tokens=1))
    finally:
        llm.engine.model = model
    assert "another thread" in answers[0]
    thread = threading.Thread(target=lambda: answers.append(llm.generate("b", SHORT)[0].finish_reason))
    thread.start()
    thread.join()
    assert answers[-1] == "length"


def test_jobs_that_come_late_do_not_hold_up_those_that_are_there(llm):
    given = []

    def jobs():
        yield Job("first", prompt=PROMPTS[0], params=SHORT)
        while not given:
            yield None
        yield Job("second", prompt=PROMPTS[1], params=SHORT)

    for job, result in llm.run(jobs()):
        assert result.finish_reason == "length"
        given.append(job.key)
    assert given == ["first", "second"]


def test_an_unknown_option_name_is_refused(model_dir):
    with pytest.raises(TypeError):
        LLM(model_dir, kv_dtype="float16")


def test_closing_frees_weights_and_pool(model_dir):
    llm = LLM(model_dir, tiers=TierConfig(hot="8MiB"))
    session = llm.chat_session()
    session.send("Hello", SHORT)
    pool, model = weakref.ref(llm.engine.store.pool), weakref.ref(llm.engine.model)
    llm.close()
    session.close()
    gc.collect()
    assert pool() is None
    assert model() is None
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("a")


def test_two_llms_live_in_one_process(model_dir, llm):
    expected = llm.generate(PROMPTS, SHORT)
    with LLM(model_dir, tiers=TierConfig(hot="4MiB"), backend="reference") as other:
        streams = [llm.stream(PROMPTS[0], SHORT), other.stream(PROMPTS[0], SHORT)]
        texts = ["".join(p.text for p in pair) for pair in zip(*streams, strict=True)]
        assert texts
        assert [r.token_ids for r in other.generate(PROMPTS, SHORT)] == [r.token_ids for r in expected]


def test_real_model_answers_from_its_text(smollm):
    question = (
        "The hidden treasure of the old pirate is a compass. The boat left at dawn.\n"
        "What is the hidden treasure of the old pirate?"
    )
    result = smollm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=30))
    assert "compass" in result.text
    assert result.finish_reason == "stop"
