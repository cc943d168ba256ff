"""Registered torch ops, namespace `fp8_ds`; each is a folder or a module: checks, a plain reference, kernels."""
