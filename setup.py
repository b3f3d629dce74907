"""Wheels with native CPU kernels.

The kernels are compiled into a wheel, which then fits a single processor type.
TILEWRIGHT_WHEEL_KERNELS=0 omits them, and 1 also compiles them into the clone of an editable
installation. pyproject.toml has all other settings.

Without a working compiler the kernels are omitted. The installation then compiles them at first
use, or runs ONNX Runtime.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

NATIVE = Path("tilewright", "compiler", "targets", "cpu", "native", "library")


def _recipe() -> ModuleType:
    """Load the recipe from its file, because the package is not installed yet."""
    spec = importlib.util.spec_from_file_location("recipe", NATIVE / "recipe.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


RECIPE = _recipe()
try:
    IS_WANTED = RECIPE.switch("TILEWRIGHT_WHEEL_KERNELS", True)
    IS_NAMED = bool(os.environ.get("TILEWRIGHT_WHEEL_KERNELS"))
    COMPILER = (RECIPE.words("CXX") if IS_WANTED else []) or ["c++"]
    _ = RECIPE.words("CXXFLAGS") if IS_WANTED else []
    HAS_KERNELS = IS_WANTED and (IS_NAMED or shutil.which(COMPILER[0]) is not None)
except ValueError as error:
    sys.exit(f"setup.py: {error}")


class BuildWithKernels(build_py):
    """Copies the package, and compiles the kernels into the directory of their sources."""

    def run(self) -> None:
        """Build as usual, then compile the kernels if requested."""
        super().run()
        if not HAS_KERNELS or (self.editable_mode and not IS_NAMED):
            return
        library = Path("" if self.editable_mode else self.build_lib, NATIVE, RECIPE.packaged_name())
        if library.exists():
            return
        for outdated in library.parent.glob("kernels-*.so"):
            outdated.unlink()
        with tempfile.TemporaryDirectory() as folder:
            try:
                *objects, link = RECIPE.commands(COMPILER, Path(folder), Path(folder, library.name))
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    list(pool.map(_run, objects))
                _run(link)
                shutil.copyfile(Path(folder, library.name), library)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"the native CPU kernels are left out: {error}", file=sys.stderr)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


class OfOneProcessor(Distribution):
    """A distribution whose wheel names the processor if it has kernels."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel contains machine code."""
        return HAS_KERNELS


setup(cmdclass={"build_py": BuildWithKernels}, distclass=OfOneProcessor)
