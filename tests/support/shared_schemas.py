"""Schemas that the authors of Prompt Cache published, where a folder above holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

BOOKSTORE = "code_generation_bookstore.xml"
PERSONA = "persona_generation.xml"
PARAMETERIZED = "parameterized_prompts.xml"


@pytest.fixture
def shared_schema():
    """The path of one of the schemas, looked for in ``shared/pml`` of every folder above."""

    def path_of(name):
        for folder in Path(__file__).resolve().parents:
            path = folder / "shared" / "pml" / name
            if path.is_file():
                return path
        return pytest.skip(f"shared/pml/{name} is in no folder above the repository")

    return path_of
