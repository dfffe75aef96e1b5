"""Biasing and reducing the blocks of a step: tables, base logits, rounding, masses."""
