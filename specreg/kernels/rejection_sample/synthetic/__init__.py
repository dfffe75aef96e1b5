"""Method `synthetic`: drafts are accepted at given rates, for benchmarks. Not lossless.

With `rates[i]` the probability that the drafts 0 .. i are all accepted and u_i a uniform of the
accept stream,

    keep draft i while  u_i rates[i-1] < rates[i]        rates[-1] = 1

The token behind the kept drafts is drawn from p, or is the argmax at temperature 0. A draft of -1,
or at or beyond the vocabulary, is not accepted. What a verification costs is close to that of the
other methods: the whole target is read, and no draft row.
"""
