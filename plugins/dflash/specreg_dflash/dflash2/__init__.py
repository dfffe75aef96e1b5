"""DFlash2: convolutions, and a walk over candidates that two tables score."""
