"""Tokens from draft logits, by Gumbel-max; owned rows are stored with their statistics on the way.

For a token with logits x (as stored: rounded to the cache's dtype) and temperature t,

    token = argmax of x_i / t + g_i         g_i = -log(E_i), E_i = -log(1 - u_i)

the lowest column on ties, and the argmax of x where t is 0. u_i is made from all 32 bits of the
first word of a Philox call of its own, whose counter holds the token's id (the target id where the
vocabulary is reduced). The noise therefore belongs to an id, whatever the layout: a watermark can
recompute it from the seed, and engines that draw this way can be compared with.

All bits, because a token wins by a small E: on a grid of 2^-23, ties at the minimum, which go to
the lowest column, put the law 2e-3 off in total variation at 151,936 equal logits; of 2^-32, 4e-6.
Small E are computed by the series of the logarithm, to the last bits.

Contract, store and statistics are those of `draft_sample`, which is several times faster: it draws
two words a token where this op draws one a logit.

Source: Gumbel (1954); Maddison, Tarlow and Minka, A* sampling (NIPS 2014).
"""
