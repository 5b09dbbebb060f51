"""The slow tier around the server: a browser, Prometheus, HAProxy, the examples of the docs.

Each test needs a program that a machine may lack; what is missing is said, and the test skipped.
"""

import importlib.util
import sys

from live import ROOT

# The servers that tests/api starts, under a name of their own: two conftest.py would be one module.
spec = importlib.util.spec_from_file_location("serving", ROOT / "tests" / "api" / "conftest.py")
sys.modules["serving"] = serving = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serving)

server = serving.server
start_server = serving.start_server
