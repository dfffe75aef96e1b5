"""Reading the target: each row is cut into blocks, which are reduced to their peaks and masses."""
