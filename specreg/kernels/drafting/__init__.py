"""What the ops that draw drafts share: arguments, loads, stores of cells, block sums and checks.

`specreg.kernels.drafting.kernel` holds the Triton device helpers, `specreg.kernels.drafting.args`
the tuples that kernels take, `specreg.kernels.drafting.checks` what entry points refuse.
"""
