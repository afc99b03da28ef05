"""Writes replies: takes prompts' KV from prefill workers (or reads them itself) and decodes."""
