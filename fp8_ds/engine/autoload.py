"""Imported by `fp8_ds_autoload.pth` when Python starts (`fp8-ds autoload on`): waits for deepspeed, nothing else."""

from fp8_ds.engine.install import install

install()
