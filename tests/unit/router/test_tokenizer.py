"""Tokenising and chat templates equal transformers', from files alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from phasor.core.errors import ConfigError, InvalidRequestError
from phasor.router.tokenizer import INLINE_CHARACTERS, ModelTokenizer

TINY = Path(__file__).parents[2] / "data" / "tiny-code-256"

TEMPLATE = """\
{%- if messages[0]['role'] != 'system' %}
    {{- bos_token + 'system: be kind' + eos_token }}
{%- endif %}
{% for message in messages %}
    {% if message['role'] == 'tool' %}
        {{ raise_exception('tools are not for this model') }}
    {% endif %}
    {{- '<' + message['role'] + '>' }}
    {%- generation -%}
{{ message['content'] | trim }}{{ message | tojson }}
    {%- endgeneration -%}
    {% if loop.last %}{% break %}{% endif %}
{{ eos_token }}{{ nowhere }}
{% endfor %}
{%- if add_generation_prompt %}
{{ '<assistant>' }}
{%- endif %}
"""

MESSAGES = [
    {"role": "user", "content": '  Où est <b>Zoë</b> & "Bob"?\n'},
    {"role": "assistant", "content": "日本 👩‍👩‍👧"},
    {"role": "user", "content": "And?"},
]


def make_folder(folder: Path, **tokenizer_config: Any) -> Path:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(TINY / name, folder / name)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


async def test_bytes_are_their_own_ids_and_come_back() -> None:
    tokenizer = ModelTokenizer(TINY)
    text = "def f(x):\n\treturn '日本 👩‍👩‍👧'\r\n\0"
    ids = await tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 256
    tokenizer.close()


async def test_long_text_leaves_the_loop_and_gives_the_same_ids() -> None:
    tokenizer = ModelTokenizer(TINY)
    text = "x = 1\n" * INLINE_CHARACTERS
    assert await tokenizer.encode(text) == list(text.encode())
    tokenizer.close()


async def test_truncation_left_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = ModelTokenizer(folder)
    assert len(await tokenizer.encode("0123456789")) == 10
    tokenizer.close()


@pytest.mark.parametrize("where", ["tokenizer_config", "list", "jinja"])
async def test_a_template_gives_what_transformers_gives(tmp_path: Path, where: str) -> None:
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
    if where == "tokenizer_config":
        config["chat_template"] = TEMPLATE
    elif where == "list":
        config["chat_template"] = [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": TEMPLATE},
        ]
    else:
        config["chat_template"] = "overridden by the file"
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    folder = make_folder(tmp_path, **config)
    ours = ModelTokenizer(folder)
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    theirs.chat_template = TEMPLATE
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert "<s>system: be kind</s>" in expected and expected.endswith("<assistant>")
    assert ours.render_chat(MESSAGES) == expected
    ours.close()


async def test_a_long_chat_is_rendered_in_a_thread_with_the_same_result(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(make_folder(tmp_path, chat_template="{{ messages[0]['content'] }}!"))
    long = "y" * (INLINE_CHARACTERS + 1)
    assert await tokenizer.encode_chat([{"role": "user", "content": long}]) == list(f"{long}!".encode())
    tokenizer.close()


def test_the_templates_own_refusal_is_an_invalid_request(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(make_folder(tmp_path, chat_template=TEMPLATE, bos_token="", eos_token=""))
    with pytest.raises(InvalidRequestError, match="tools are not for this model") as caught:
        tokenizer.render_chat([{"role": "tool", "content": "1"}])
    assert caught.value.field == "messages"
    tokenizer.close()


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{% set _ = messages.append(1) %}", "{{ ''.__init__.__globals__ }}"],
)
def test_a_template_cannot_leave_the_sandbox(tmp_path: Path, template: str) -> None:
    tokenizer = ModelTokenizer(make_folder(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequestError, match="refuses"):
        tokenizer.render_chat(MESSAGES)
    tokenizer.close()


def test_a_model_without_template_says_to_use_generate() -> None:
    tokenizer = ModelTokenizer(TINY)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="use Generate"):
        tokenizer.render_chat(MESSAGES)
    tokenizer.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("config.json", None),
        ("config.json", "not json"),
        ("config.json", "[]"),
        ("config.json", '{"vocab_size": "many"}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
    ],
)
def test_a_damaged_folder_names_the_file(tmp_path: Path, name: str, content: str | None) -> None:
    folder = make_folder(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        ModelTokenizer(folder)


@pytest.mark.slow
async def test_smollm2_equals_transformers(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = ModelTokenizer(smollm2_folder), AutoTokenizer.from_pretrained(smollm2_folder)
    conversations = [
        MESSAGES,
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x  12345 \n\n\t7"}],
    ]
    for messages in conversations:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert await ours.encode_chat(messages) == expected
    for text in ["Hello", "a  12 b", "日本 👩‍👩‍👧\r\n\0", "<|im_start|>user", "def f():\n    return 1"]:
        ids = theirs(text)["input_ids"]
        assert await ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    ours.close()
