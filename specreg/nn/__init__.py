"""Modules that targets and drafters share."""
