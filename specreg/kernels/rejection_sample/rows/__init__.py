"""What every method of `rejection_sample` does with logits rows: reduce, judge a draft, draw.

`kernel` holds the Triton kernels and device helpers, `reference` the torch twins.
"""
