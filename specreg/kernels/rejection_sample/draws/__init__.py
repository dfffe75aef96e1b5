"""Drawing the token behind the kept drafts: from p, from p without a draft, or from a residual.

`kernel` holds the Triton device helpers, `reference` the torch twins.
"""
