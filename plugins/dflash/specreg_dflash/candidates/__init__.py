"""Drafting among the few best columns of each row: what DFlash2 and LiLiCorr share."""
