"""guidellm, as its command line runs it."""

import json
import pathlib
import subprocess
import sys


def synthetic(tokens_in, tokens_out):
    return f"prompt_tokens={tokens_in},output_tokens={tokens_out}"


def run_guidellm(url, model, folder, streams, requests, data, report, *flags):
    """Its report of one closed loop, as it writes it. `data`: a file, or synthetic()."""
    command = [
        str(pathlib.Path(sys.executable).with_name("guidellm")), "benchmark", "run",
        "--target", url, "--model", model, "--processor", str(folder),
        "--rate-type", "concurrent", "--rate", str(streams), "--max-requests", str(requests),
        "--data", str(data), "--random-seed", "1",
        "--output-path", str(report), "--disable-progress", *flags,
    ]
    result = subprocess.run(command, cwd=report.parent, timeout=900, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout
    return json.loads(report.read_text())["benchmarks"][0]
