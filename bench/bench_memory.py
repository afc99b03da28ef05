"""Bytes of KV per token of running workers, as they say themselves, beside the arithmetic of the model's config."""

import json
from pathlib import Path

import harness
import servers

from phasor.engine.model_source import resolve_model

TINY_FOLDER = harness.REPOSITORY / "tests" / "data" / "tiny-code-256"
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def expected_bytes(folder: Path, dtype: str) -> tuple[int, dict[str, int]]:
    """Return 2 * layers * kv_heads * head_dim * bytes, and its factors, from the model's own config."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    factors = {
        "num_layers": config["num_hidden_layers"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "item_bytes": ITEM_BYTES[dtype],
    }
    product = 2
    for factor in factors.values():
        product *= factor
    return product, factors


def main() -> None:
    arguments = harness.arguments(__doc__ or "")
    folder = TINY_FOLDER if arguments.smoke else resolve_model("smollm2")
    dtypes = ("float32",) if arguments.smoke else ("float32", "bfloat16")
    for dtype in dtypes:
        with servers.Servers() as started:
            (address,) = started.start(servers.worker_command("decode", str(folder), "--dtype", dtype))
            description = servers.describe(started.worker(address))
            found = description.block_bytes / description.identity.block_tokens
            expected, factors = expected_bytes(folder, dtype)
            harness.report(
                "kv_memory",
                {
                    "model": folder.name,
                    "dtype": dtype,
                    "block_tokens": description.identity.block_tokens,
                    **factors,
                },
                harness.constant(found),
                harness.constant(expected),
                baseline_name="2 * layers * kv_heads * head_dim * bytes",
                goal_ratio=1.0,
                unit="bytes per token",
                scale=1.0,
            )
            if found != expected:
                raise SystemExit(
                    f"{dtype}: a worker says {found} bytes of KV per token, {expected} are right"
                )


if __name__ == "__main__":
    main()
