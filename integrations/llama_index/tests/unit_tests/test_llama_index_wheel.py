"""The package installed from its wheel, beside others of LlamaIndex's namespace and alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
OTHER = "llama_index/llms/huggingface"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels of pc-rag and of the package for LlamaIndex."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in (ROOT, ROOT / "integrations/llama_index"):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
            cwd=project,
            check=True,
            capture_output=True,
        )
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory):
    """A folder with what is installed here, without our packages and others of the namespace."""
    folder = tmp_path_factory.mktemp("dependencies")
    installed = Path(sysconfig.get_path("purelib"))
    for path in installed.iterdir():
        if path.name not in ("llama_index", "pc_rag") and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    (folder / "llama_index").mkdir()
    (folder / "llama_index/core").symlink_to(installed / "llama_index/core")
    return folder


def _run(code, *, paths):
    """Run Python that sees these folders and nothing else that is installed."""
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=paths[0],  # where Python looks first
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )


CODE = f"""
import importlib.util
from llama_index.llms.pc_rag import PcRagLLM
from llama_index.core.llms import LLM
import pc_rag
print(issubclass(PcRagLLM, LLM), PcRagLLM.__module__, pc_rag.__file__)
print(importlib.util.find_spec({OTHER.replace("/", ".")!r}) is not None)
"""


@pytest.mark.parametrize("has_other", [True, False])
def test_the_model_is_importable_when_its_wheel_is_installed(
    wheels, dependencies, tmp_path, has_other
):
    """With and without another ``llama_index.llms`` package beside it."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    if has_other:
        shutil.copytree(Path(sysconfig.get_path("purelib")) / OTHER, tmp_path / OTHER)
    done = _run(CODE, paths=(tmp_path, dependencies))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [
        f"True llama_index.llms.pc_rag.base {tmp_path / 'pc_rag/__init__.py'}",
        str(has_other),
    ]


def test_wheels_hold_no_file_of_the_shared_namespace(wheels):
    """A file above ``pc_rag`` would shadow other packages, or be overwritten by them."""
    ours = next(wheel for wheel in wheels if "llama_index" in wheel.name)
    names = [name for name in zipfile.ZipFile(ours).namelist() if ".dist-info/" not in name]
    assert names
    assert all(name.startswith("llama_index/llms/pc_rag/") for name in names)
    assert "llama_index/llms/pc_rag/py.typed" in names
