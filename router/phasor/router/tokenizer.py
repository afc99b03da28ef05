"""Text to token ids and back, and messages to text, from a model folder, without transformers.

Renders chat templates as transformers does (trim_blocks, lstrip_blocks, `raise_exception`, special tokens by
name) in a sandbox, because a template is code that came with the weights. A test holds both equal.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phasor.core.errors import ConfigError, InvalidRequestError

INLINE_CHARACTERS = 2048
"""Texts up to this long are tokenised on the event loop (under a millisecond); longer ones in a thread."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelTokenizer:
    """The tokenizer and chat template of one model folder. Owns two threads until `close`.

    Args:
        folder: holds tokenizer.json and config.json; for chat also chat_template.jinja or
            tokenizer_config.json.

    Raises:
        ConfigError: a file is missing or cannot be read, naming its path.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        tokenizer_config = _read_json(folder / "tokenizer_config.json", required=False)
        legacy_map = _read_json(folder / "special_tokens_map.json", required=False)
        self.vocab_size = _vocab_size(folder)
        self._special_tokens = _special_tokens({**legacy_map, **tokenizer_config})
        self._template = _compile_template(folder, tokenizer_config)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._template is not None

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the special tokens that its own post-processor adds."""
        return await self._encode(text, add_special_tokens=True)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of messages laid out by the model's template, ready for the assistant's turn.

        Raises:
            InvalidRequestError: the model has no template, or its template refuses the messages.
        """
        if sum(len(message["content"]) for message in messages) <= INLINE_CHARACTERS:
            text = self.render_chat(messages)
        else:
            text = await asyncio.get_running_loop().run_in_executor(self._threads, self.render_chat, messages)
        # The template wrote the special tokens itself.
        return await self._encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of messages with the generation prompt. Blocking; raises as `encode_chat`."""
        if self._template is None:
            hint = "this model's folder has no chat template; use Generate with a prompt"
            raise InvalidRequestError("messages", f"{len(messages)} message(s)", hint)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as exc:
            roles = [message["role"] for message in messages]
            hint = f"the model's chat template refuses them: {exc}"
            raise InvalidRequestError("messages", roles, hint) from exc

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included: decoding what was encoded loses nothing."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def close(self) -> None:
        """Let the threads go; a text being tokenised is finished and thrown away. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= INLINE_CHARACTERS:
            return self._encode_blocking(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_blocking, text, add_special_tokens)

    def _encode_blocking(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def _load_tokenizer(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError("model.path", str(path), "no such file; save the folder with its fast tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception for every kind of damage
        raise ConfigError("model.path", str(path), f"not a tokenizer file: {exc}") from exc
    # Some files carry the truncation of their training run, which would silently cut prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        if required:
            raise ConfigError("model.path", str(path), "no such file; is this a model folder?") from exc
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError("model.path", str(path), f"cannot be read: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError("model.path", str(path), "is not a JSON object")
    return value


def _vocab_size(folder: Path) -> int:
    """The model's own size: its embedding may have more rows than the tokenizer has tokens."""
    config = _read_json(folder / "config.json", required=True)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int) or size < 1:
        raise ConfigError("model.path", str(folder / "config.json"), f"vocab_size is {size!r}, not a count")
    return size


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _compile_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> jinja2.Template | None:
    source: Any = tokenizer_config.get("chat_template")
    origin = folder / "chat_template.jinja"
    if origin.is_file():
        source = origin.read_text(encoding="utf-8")
    else:
        origin = folder / "tokenizer_config.json"
    if isinstance(source, list):
        source = next((item.get("template") for item in source if item.get("name") == "default"), None)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, TypeError) as exc:
        raise ConfigError("model.path", str(origin), f"the chat template does not compile: {exc}") from exc


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; when serving its body is just text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
