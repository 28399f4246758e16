"""Chat templates: rendered as transformers renders them, errors in one sentence."""

from __future__ import annotations

import pytest
from tiny_tokenizers import tiny_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from minikv.errors import RequestError, TemplateError
from minikv.text.template import ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + ns.system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
THINKING = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role != "user" %}{% continue %}{% endif %}
    {%- set ns.last = index %}
    {%- break %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- generation %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}
    [{{ document.title }}] {{ document.text }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
DATED = """{% for message in messages %}
    {% if message.role == 'system' %}
Today is {{ strftime_now('%d %b %Y') }}.
    {% endif %}
  <{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endfor %}
{{ undefined_name }}{% if add_generation_prompt %}<assistant>{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "thinking": THINKING, "dated": DATED}
USER = [{"role": "user", "content": " Grüß dich, 世界! <b>&'\" "}]
TALK = [
    {"role": "system", "content": "Be brief.\n"},
    *USER,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHallo."},
    {"role": "user", "content": "What is 2 + 2?"},
]
CALL = {"type": "function", "function": {"name": "see", "arguments": {"ort": "Köln"}}}
TOOL_TALK = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sonnig ☀"},
]
TOOLS = [
    {"type": "function", "function": {"name": "see", "description": "Wetter für <Ort>", "parameters": {}}}
]
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def expected(source: str, messages: list[dict], **variables) -> str:
    # What apply_chat_template does before it renders: keys without a value are dropped.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return render_jinja_template([messages], chat_template=source, **(SPECIAL | variables))[0][0]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [USER, TALK], ids=["user", "talk"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(name, messages, add_generation_prompt):
    got = ChatTemplate(TEMPLATES[name]).render(messages, add_generation_prompt, SPECIAL)
    assert got == expected(TEMPLATES[name], messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("thinking", {"enable_thinking": False}),
        ("thinking", {"enable_thinking": True}),
        ("thinking", {"documents": [{"title": "Eins", "text": "Zwei"}]}),
        ("llama", {"tools": TOOLS, "date_string": "1 Jan 2030"}),
        ("llama", {"bos_token": "<own>"}),
    ],
)
def test_template_arguments_reach_the_template_as_in_transformers(name, variables):
    got = ChatTemplate(TEMPLATES[name]).render(TALK, True, SPECIAL, **variables)
    assert got == expected(TEMPLATES[name], TALK, add_generation_prompt=True, **variables)


def test_tool_calls_without_content_equal_transformers():
    got = ChatTemplate(LLAMA).render(TOOL_TALK, True, SPECIAL, tools=TOOLS)
    assert got == expected(LLAMA, TOOL_TALK, add_generation_prompt=True, tools=TOOLS)
    assert "Köln" in got
    assert "für <Ort>" in got


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    got = ChatTemplate(CHATML).render([{"role": "user", "content": parts}], True, {})
    assert got == ChatTemplate(CHATML).render([{"role": "user", "content": "one two"}], True, {})


def test_messages_of_the_caller_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]
    ChatTemplate(CHATML).render(messages, True, {})
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "Roles must alternate!"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{% for m in messages %}{{ m.role }}", "syntax error"),
        ("{% endgeneration %}", "syntax error"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{{ nope | tojson }}", "not JSON serializable"),
        ("{% include 'x' %}", "no loader"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{{ raise_exception('two\nlines') }}", "two lines."),
    ],
)
def test_template_errors_are_one_sentence_with_the_templates_own_words(source, words):
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(USER, True, {})
    sentence = str(caught.value)
    assert words in sentence
    assert "\n" not in sentence
    assert sentence[-1] in ".!?"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hello", "must be a list of messages, not str"),
        ({"role": "user"}, "must be a list of messages, not dict"),
        (["hello"], "Message 1 must be an object"),
        ([{"content": "x"}], 'Message 1 has no "role"'),
        ([*USER, {"role": "pirate", "content": "x"}], "Message 2 has the unknown role 'pirate'"),
        ([{"role": 7, "content": "x"}], "unknown role 7"),
        ([{"role": "user"}], 'has no "content"'),
        ([{"role": "assistant", "content": None}], 'has no "content"'),
        ([{"role": "user", "content": 5}], "not int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "type 'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], '"text" is not a string'),
        ([{"role": "user", "content": "x", "extra": object()}], "plain JSON data"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages, words):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render(messages, True, {})
    assert words in str(caught.value)


def test_a_role_that_the_template_knows_is_accepted():
    source = (
        "{% for m in messages %}{% if m.role == 'available_tools' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render([{"role": "available_tools", "content": "x"}], True, {}) == "x"


@pytest.mark.parametrize("name", ["messages", "raise_exception"])
def test_reserved_template_arguments_are_refused(name):
    with pytest.raises(TemplateError, match=name):
        ChatTemplate(CHATML).render(USER, True, {}, **{name: "x"})


def test_a_template_argument_that_is_not_data_is_refused():
    with pytest.raises(RequestError, match="tools holds"):
        ChatTemplate(CHATML).render(USER, True, {}, tools=[print])


def test_of_several_templates_the_default_is_used_and_tool_use_for_tools():
    tokenizer = tiny_tokenizer("byte_level", chat_template={"default": "plain", "tool_use": "with tools"})
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=TOOLS) == "with tools"
    assert tiny_tokenizer("byte_level", chat_template={"default": "x"}).render_chat(USER, tools=TOOLS) == "x"


def test_several_templates_without_a_default_are_an_error():
    tokenizer = tiny_tokenizer("byte_level", chat_template={"rag": "x", "other": "y"})
    with pytest.raises(TemplateError, match="other, rag"):
        tokenizer.render_chat(USER)


def test_a_model_without_a_template_says_so():
    tokenizer = tiny_tokenizer("byte_level")
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.render_chat(USER)


def test_a_broken_template_does_not_keep_raw_prompts_from_working():
    tokenizer = tiny_tokenizer("byte_level", chat_template="{% if %}")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    with pytest.raises(TemplateError, match="syntax error"):
        tokenizer.render_chat(USER)


def test_special_tokens_and_arguments_pass_through_the_tokenizer():
    tokenizer = tiny_tokenizer(
        "byte_level",
        chat_template="{{ bos_token }}|{{ add_generation_prompt }}|{{ mood }}",
        special_tokens=SPECIAL,
    )
    assert tokenizer.render_chat(USER, mood="good") == "<|begin|>|True|good"
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == "<|begin|>|False|"


def test_the_real_models_own_template_equals_transformers(smollm_path):
    from minikv.models.sources import open_model, resolve_model

    opened = open_model(resolve_model(str(smollm_path)))
    opened.weights.close()
    for messages in (USER, TALK):
        got = opened.tokenizer.render_chat(messages)
        source = opened.tokenizer._templates["default"].source
        assert got == expected(source, messages, add_generation_prompt=True)
        assert opened.tokenizer.decode(opened.tokenizer.encode_rendered(got), skip_special=False) == got
