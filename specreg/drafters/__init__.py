"""What drafters share that read the target's hidden states: rows, and the loop over them."""
