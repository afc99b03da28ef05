"""The models that tests run on."""

from pathlib import Path

TINY_FOLDER = Path(__file__).parents[1] / "data" / "tiny-code-256"
"""1.62 M parameters, trained on code bytes, trained length 256; token ids are UTF-8 bytes."""
