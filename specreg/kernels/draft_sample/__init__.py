"""Tokens from draft logits, by inverse CDF; owned rows are stored with their statistics on the way.

For a token with logits x (as stored: rounded to the cache's dtype), temperature t and blocks B_1,
B_2, ... of 512 columns,

    peak_b = max of x over B_b             mass_b = sum of exp((x_i - peak_b) / t) over B_b
    block  ~ mass_b exp((peak_b - top) / t)  with the first random word, top = max of peak
    token  ~ exp((x_i - peak_b) / t) inside the block, with the second
    logsumexp = top / t + log(sum of mass_b exp((peak_b - top) / t))

and the argmax, lowest column first, where t is 0. Two words, because the 2^23 values of one are too
coarse for a vocabulary of 10^5: the law of one word is 3e-3 off in total variation, that of two at
most 2e-5. All sums are of integers (`specreg.kernels.common`), so they are exact and a token
depends on nothing but its own logits, temperature, seed, position and step.

Bytes that must move for T tokens over V columns of s bytes: `T V s (1 + 1/num_shards)`.

Source: inverse transform sampling; the split into blocks is specreg's own.
"""
