"""Builds the native CPU kernels as an optional step of installing; everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# By path: importing quire would want torch, which a build environment does not have.
_spec = importlib.util.spec_from_file_location("quire_cpu_build", Path(__file__).parent / "quire/kernels/cpu/build.py")
assert _spec is not None and _spec.loader is not None
native = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


class BuildNative(build_ext):
    """One library loaded with ctypes: no Python headers, no version in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / native.LIBRARY_NAME)

    def build_extension(self, ext: Extension) -> None:
        try:
            native.build(Path(self.get_ext_fullpath(ext.name)).parent)
        except native.BuildError as error:
            print(f"warning: native CPU kernels not built, torch will be used instead: {error}", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        if all(Path(self.build_lib, self.get_ext_filename(ext.name)).exists() for ext in self.extensions):
            super().copy_extensions_to_source()


class WheelOfPlatform(bdist_wheel):
    """One wheel for every Python, as none of it is compiled against one: py3-none-<platform>, or any if nothing is."""

    def get_tag(self) -> tuple[str, str, str]:
        build = self.get_finalized_command("build_ext")
        if not any(Path(build.get_ext_fullpath(ext.name)).exists() for ext in self.distribution.ext_modules):
            return "py3", "none", "any"
        # A universal Python on macOS still compiled for one processor.
        return "py3", "none", super().get_tag()[2].replace("universal2", platform.machine())


setup(
    ext_modules=[Extension("quire.kernels.cpu.libquire_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": WheelOfPlatform},
)
