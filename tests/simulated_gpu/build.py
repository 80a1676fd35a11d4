"""Build the simulated device, and load it before PyTorch looks for a real one."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

NAME = "simulated_device"
SOURCE = Path(__file__).with_name("device.cpp")


def compiler() -> str | None:
    """Find a compiler for C++, where Python's headers are too."""
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    return (shutil.which("c++") or shutil.which("g++")) if has_headers else None


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")  # which imports nothing
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def build() -> Path:
    """Compile the library, once for each source and PyTorch; half a minute.

    `torch.utils.cpp_extension` would import PyTorch, before which the library must be loaded, and needs ninja.
    """
    torch = _torch_folder()
    of = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + sys.version.encode()
    library = SOURCE.parent / "built" / f"{NAME}-{hashlib.sha256(of).hexdigest()[:16]}.so"
    if library.exists():
        return library
    library.parent.mkdir(exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")
    include = torch / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include"))
    command = [str(compiler()), "-shared", "-fPIC", "-std=c++20", "-O1", f"-DTORCH_EXTENSION_NAME={NAME}"]
    command += [f"-I{folder}" for folder in folders]
    command += [str(SOURCE), "-o", str(made), f"-L{torch / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    made.replace(library)  # at once: another process may build it too
    return library


def load() -> ModuleType:
    """Load the device into this process, which has not imported PyTorch."""
    assert "torch" not in sys.modules, "PyTorch looks for a device once, when it is imported"
    library = build()
    for needed in ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_python.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / needed), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))  # registers the hooks that PyTorch asks for while it is imported
    import torch  # noqa: F401  the module's types are PyTorch's

    loader = ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
