"""What several ops share: owner and row arithmetic, cleaned logits, and draws by inverse CDF.

`specreg.kernels.common.kernel` holds the Triton device helpers, `specreg.kernels.common.reference`
their torch twins under the same names with `_reference` appended.

Draws work on *units*: non-negative int64 weights whose sums are exact. So the order of a reduction,
and with it batch size and block layout, cannot change a token, and a lane of weight 0 is never
drawn.
"""
