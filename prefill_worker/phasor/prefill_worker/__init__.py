"""Reads prompts: computes their KV in chunks, hands the pages to a decode worker, samples the first token."""
