"""guidellm, as its command line runs it."""

import json
import pathlib
import subprocess
import sys


def run_guidellm(url, model, folder, streams, requests, tokens_in, tokens_out, report, *flags):
    """Its report of one closed loop, as it writes it."""
    command = [
        str(pathlib.Path(sys.executable).with_name("guidellm")), "benchmark", "run",
        "--target", url, "--model", model, "--processor", str(folder),
        "--rate-type", "concurrent", "--rate", str(streams), "--max-requests", str(requests),
        "--data", f"prompt_tokens={tokens_in},output_tokens={tokens_out}", "--random-seed", "1",
        "--output-path", str(report), "--disable-progress", *flags,
    ]
    result = subprocess.run(command, cwd=report.parent, timeout=900, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout
    return json.loads(report.read_text())["benchmarks"][0]
