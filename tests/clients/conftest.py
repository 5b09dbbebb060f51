"""The second tier: programs that others wrote, unmodified, against the real server.

They are many and heavy, so they have an environment of their own (requirements.txt). Nothing is
fetched while they run.
"""

import importlib.util
import os
import pathlib
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Read when the libraries are imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HOME=tempfile.mkdtemp(prefix="fathom-clients-"),
    TOKENIZERS_PARALLELISM="false",
)

_spec = importlib.util.spec_from_file_location("servers", ROOT / "tests" / "api" / "conftest.py")
servers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(servers)

server = servers.server
start_server = servers.start_server


@pytest.fixture(scope="session")
def model_folder():
    return pathlib.Path(servers.find_model())


@pytest.fixture(scope="session")
def binary():
    return servers.BINARY
