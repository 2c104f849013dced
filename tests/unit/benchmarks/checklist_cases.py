"""Cases of a made-up part of the checklist, for test_checklist.py. Imports no torch, so that its process starts at
once."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

from benchmarks.gpu.case import Case, Result
from benchmarks.gpu.record import MissingError, NotRunError

CHILD = "child.pid"


def good():
    return Result("fine", {"number": float("nan")})


def bad():
    raise ValueError("two\nlines")


def missing():
    raise MissingError("nowhere")


def skipped():
    raise NotRunError("not on this GPU")


def crash():
    print("the last words", flush=True)
    os._exit(9)


def crash_beside_a_fork():
    """The forked process lives on, with the pipe to the driver open."""
    if os.fork() == 0:
        threading.Event().wait()
    os._exit(9)


def hang():
    threading.Event().wait()


def lose_the_gpu():
    """The case fails, and then nothing that uses the GPU works in this process."""

    def synchronize():
        raise RuntimeError("an illegal memory access was encountered")

    sys.modules["torch"] = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, synchronize=synchronize)
    )
    raise RuntimeError("the kernel failed")


def fill_the_gpu():
    """The case succeeds, and leaves memory in use."""
    sys.modules["torch"] = SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            synchronize=lambda: None,
            empty_cache=lambda: None,
            memory_allocated=lambda: 1 << 34,
        )
    )
    return Result("filled")


def use_the_gpu():
    """Fails in a process that lost the GPU or left it full; another one has no torch."""
    if "torch" in sys.modules:
        raise RuntimeError("the process of the case before")
    return Result("fine")


def leave_a_child(out):
    """A process that would never end."""
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    (out / CHILD).write_text(str(child.pid))
    return Result("started")


def cases(setting):
    return [
        Case("good", good),
        Case("bad", bad),
        Case("missing", missing),
        Case("skipped", skipped),
        Case("crash", crash),
        Case("after the crash", good),
        Case("crash beside a fork", crash_beside_a_fork),
        Case("hang", hang, limit=0.5),
        Case("after the hang", good),
        Case("lose the GPU", lose_the_gpu),
        Case("after the loss", use_the_gpu),
        Case("too long", good, seconds=1e6),
        Case("hang for long", hang, seconds=0.0, limit=1e6),
        Case("fill the GPU", fill_the_gpu),
        Case("after it was filled", use_the_gpu),
        Case("child", lambda: leave_a_child(setting.out)),
    ]
