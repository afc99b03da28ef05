"""What both workers run: the model, rope, paged KV, block accounting, sampling."""
