"""Tests; what each folder holds is in CONTRIBUTING.md."""
