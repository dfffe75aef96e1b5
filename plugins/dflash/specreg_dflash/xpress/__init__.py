"""XPress: drafts that a few passes of a small causal model refine together."""
