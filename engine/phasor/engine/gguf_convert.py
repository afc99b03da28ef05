"""Turn a llama GGUF file into a plain Hugging Face folder: bfloat16 safetensors, tokenizer, chat template.

A program of its own (`python -m phasor.engine.gguf_convert FILE OUT`), because what silences transformers' bars and
warnings must be set before it is imported, and because the memory should go back to the system afterwards.
Converts nothing that it would get wrong: an unknown architecture or pre-tokeniser is refused by name.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

CONVERSION_VERSION = 1
"""Raise it when the folder comes out differently; folders of another version are made again."""
CONVERTER_PACKAGES = {"gguf": "gguf>=0.17", "accelerate": "accelerate>=1.10"}
"""Modules that a conversion needs beyond Phasor's own dependencies, and how to ask pip for them."""
DTYPE = "bfloat16"
QUIET_ENVIRONMENT = {
    "TQDM_DISABLE": "1",
    # Says of llama that weights are "packed" although they are dequantised, and other things that are not so here.
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class UnsupportedGgufError(Exception):
    """The file has a feature that would be converted wrongly."""


def convert(gguf: Path, out: Path) -> None:
    """Write the folder `out` (which must exist and be empty) from `gguf`. Takes a minute and 1 GB.

    Raises:
        UnsupportedGgufError: naming the key and value that are not known here.
    """
    # First, so that a refusal does not wait for torch.
    pre_tokenizer = _pre_tokenizer(_read_facts(gguf)["tokenizer.ggml.pre"])

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        # Without this the model counts as quantised, and save_pretrained refuses it.
        quantization_config=GgufConfig(gguf_file=name, dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # transformers ignores `tokenizer.ggml.pre`: no round trip shows it, but spaces before digits get other ids.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _clean(out)


def _read_facts(gguf: Path) -> dict[str, str]:
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    facts = {}
    for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"):
        facts[key] = str(fields[key].contents()) if key in fields else ""
    for key, known in {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}.items():
        if facts[key] != known:
            raise UnsupportedGgufError(f"{key} is {facts[key]!r}; only {known!r} can be converted")
    return facts


def _pre_tokenizer(name: str) -> Any:
    """Return what llama.cpp does for `tokenizer.ggml.pre` = `name`."""
    from tokenizers import pre_tokenizers

    if name != "smollm":
        raise UnsupportedGgufError(f"tokenizer.ggml.pre is {name!r}; only 'smollm' can be converted")
    return pre_tokenizers.Sequence(
        [
            # Every digit is a token of its own, so spaces before it stay together.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def _clean(out: Path) -> None:
    """Take out what describes the conversion instead of the model."""
    import numpy

    config = _load(out / "config.json")
    for key in ("_model_name_or_path", "_name_or_path"):
        config.pop(key, None)
    # The file holds a float32; its shortest decimal is what the model's author wrote (1e-05).
    config["rms_norm_eps"] = float(str(numpy.float32(config["rms_norm_eps"])))
    _save(out / "config.json", config)
    generation = _load(out / "generation_config.json")
    # Left in, transformers would rewrite these values from config.json.
    generation.pop("_from_model_config", None)
    _save(out / "generation_config.json", generation)
    tokenizer = _load(out / "tokenizer_config.json")
    for key in ("is_local", "local_files_only", "name_or_path"):
        tokenizer.pop(key, None)
    _save(out / "tokenizer_config.json", tokenizer)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors come out readable by their owner only


def _load(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _save(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Convert `argv[0]` into the folder `argv[1]`; return the exit status."""
    gguf, out = (Path(arg) for arg in argv)
    os.environ.update(QUIET_ENVIRONMENT)
    try:
        convert(gguf, out)
    except UnsupportedGgufError as exc:
        sys.stderr.write(f"{gguf.name}: {exc}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
