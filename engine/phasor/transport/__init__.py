"""Links and transfers of pages between workers. Takes tensors and block ids, not the pool."""
