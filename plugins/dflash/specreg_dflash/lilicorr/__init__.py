"""LiLiCorr: a walk over candidates that a transformer over all of them scores."""
