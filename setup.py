"""Maps the room folders at the top level into the one import package `kvbridge`."""

from setuptools import find_packages, setup

ROOMS = ("calibration", "cascade", "configs", "eval", "kernels", "mappers")
FOLDERS = {"kvbridge": "kvbridge"} | {f"kvbridge.{room}": room for room in ROOMS}

setup(
    package_dir=FOLDERS,
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{nested}" for nested in find_packages(folder)))
    ],
)
