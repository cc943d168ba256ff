"""DeepSpeed's op for a CPU is built: g++ takes a minute or five for it, which belongs in no test's time-out."""

from deepspeed.comm.torch import build_shm_op

from fp8_ds.tools.doctor.diagnosis import abandoned, build_root

if __name__ == "__main__":
    for lock in abandoned(build_root()):
        lock.unlink(missing_ok=True)
    build_shm_op()
