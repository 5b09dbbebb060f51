"""What the tests here share."""

import pathlib
import shutil
import socket

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def find_program(*names, package):
    """The path of the first that is installed; skips the test where there is none."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"{names[0]} is not installed (Debian's package {package} has it)")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
