"""Registered torch ops, namespace `fp8_ds`; one folder each: checks and dispatch, a plain reference, kernels."""
