"""Reading cells of the draft-logits cache, in whatever layout they are stored.

A cell gives a logit to every column of the target's vocabulary: -inf where the layout holds none,
which makes the draft probability 0. What is read is the same value in every layout, so tokens are
the same too.
"""
