"""Imported where ranks are forked: the first engine of a rank finds DeepSpeed's functions imported and hashed."""

from fp8_ds.engine.seam_check import installed_hashes

installed_hashes()
