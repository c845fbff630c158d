"""Puts a copy of configs/ into the package, so that an installed firstorder has them; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout reads its own configs/
            target = Path(self.build_lib, "lab", "config", "shipped_files")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("configs", target)


setup(cmdclass={"build_py": BuildWithConfigs})
