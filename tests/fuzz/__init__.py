"""Randomised campaigns: each module here draws cases from a seed, and holds the product to what it promises of all."""
