"""`python -m specreg` is the command line."""

from specreg.cli import main

main()
