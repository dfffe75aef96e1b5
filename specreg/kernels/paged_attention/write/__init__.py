"""The Triton kernel of `write_kv`."""
