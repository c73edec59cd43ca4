"""A file as memory that processes share, without a descriptor that the script would see.

Python's own mmap keeps a duplicate of the descriptor before 3.13. The map lasts as long as the process.
"""

from __future__ import annotations

import mmap

_PYBUF_WRITE = 0x200  # from CPython's stable ABI


def map_file(fd: int, size: int) -> memoryview:
    """The first `size` bytes of the file, readable and writable. Raises OSError."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap of the heartbeat file failed")
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view: memoryview = prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))(address, size, _PYBUF_WRITE)
    return view
