"""What pyproject.toml cannot say: the packages are those that are here, as any wing may have been deleted, and the
fixtures, at the root of a checkout, go inside the package."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["starter", "starter.*"]), "starter.fixtures"],
      package_dir={"starter.fixtures": "fixtures"})
