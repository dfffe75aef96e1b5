"""Causal convolutions around the sublayers of a block's layers."""
