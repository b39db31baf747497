"""The package as a part of LlamaIndex's namespace."""

from __future__ import annotations

import importlib
import subprocess
import sys

import llama_index.llms.pc_rag as package
import pytest


@pytest.mark.parametrize("name", package.__all__)
def test_names_are_found_when_the_package_promises_them(name):
    """Every name of ``__all__`` is there, and known to ``dir``."""
    assert getattr(package, name).__name__ == name
    assert name in dir(package)


def test_an_unknown_name_is_an_attribute_error():
    """Another name is refused as Python does it."""
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


def test_importing_does_no_work():
    """Neither torch nor LlamaIndex's core is loaded before a name is used."""
    code = (
        "import sys, llama_index.llms.pc_rag; "
        "sys.exit(sorted({'torch', 'llama_index.core'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_packages_of_the_namespace_are_importable_beside_it():
    """Neither hides the other."""
    assert importlib.import_module("llama_index.llms.huggingface").__name__
    assert importlib.import_module("llama_index.llms.pc_rag") is package
