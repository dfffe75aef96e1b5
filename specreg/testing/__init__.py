"""What tests of speculators and engines share."""
