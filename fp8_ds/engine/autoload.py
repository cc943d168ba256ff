"""Wait for deepspeed: `fp8_ds_autoload.pth` imports this module when Python starts (`fp8-ds autoload on`)."""

from fp8_ds.engine.install import install

install()
