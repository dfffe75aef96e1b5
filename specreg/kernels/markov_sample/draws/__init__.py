"""Drawing the tokens of a step whose launch has ended: one request, or all by all programs."""
