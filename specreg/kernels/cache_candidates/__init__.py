"""A draft token from a few scored candidates, which are stored with their statistics.

For a token with candidates (i, x_i), temperature t and peak the largest x,

    token ~ exp((x_i - peak) / t)         with one random word, candidates in the order of their ids
    logsumexp = peak / t + log(sum of exp((x_i - peak) / t))

and the largest x, smallest id first, where t is 0. The draft distribution is 0 everywhere else. A
candidate counts if its id lies in the vocabulary, its score is a number above -inf, and no earlier
one that counts has its id; the others are absent: never drawn, stored as id -1.

A dense cell is a row of -inf but for its candidates, whose ids are kept beside it: what the
previous proposal stored there is set back to -inf before the new scores are written. A `top_k` cell
is the pairs alone. Weights are integers, so a token depends neither on the layout nor on the order
of the candidates.

Bytes that must move for T tokens of k candidates with ids of 8 bytes: `12 T k` to read, on the
owner `8 k` to write in layout `top_k` and up to `k (8 + 2 s)` scattered ones in `dense`: kilobytes,
so the op costs its launch.

Source: inverse transform sampling; the drafters that score candidates are DFlash2 and its like.
"""
