"""Page-locked host memory, into which a CUDA device copies while the training thread continues."""

from __future__ import annotations

import ctypes
import sys
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_tensors: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def page_locked(shape: Any, dtype: Any) -> Any:
    """Return an uninitialized page-locked tensor with this shape and dtype."""
    tensor = sys.modules["torch"].empty(shape, dtype=dtype, pin_memory=True)
    _tensors[next(_numbers)] = tensor
    return tensor


def keep_if_device_failed() -> None:
    """If the CUDA device has failed, keep the tensors of `page_locked` alive, because freeing them would abort the process.

    After an error in a kernel, such as a failed assertion, every call of CUDA in this process fails. If torch then frees a
    page-locked tensor into which a device has copied, it ends the process with SIGABRT, before Python has shown the error. The
    function does not wait for the device.
    """
    if not _tensors:
        return
    try:
        sys.modules["torch"].cuda.current_stream().query()
    except Exception:  # the device has failed: increase the tensors' reference counts, so that Python never frees the tensors
        for tensor in list(_tensors.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
