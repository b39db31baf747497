"""Source files as modules: ask for code that uses two of the files of a project.

python examples/pml/code_generation.py

The project is the package json of Python's own library, wherever it lies on this machine.
"""

from __future__ import annotations

import json
from pathlib import Path

from _report import ENGINE, compare

from pc_rag import PromptCache, parse_prompt, parse_schema

SCHEMA = """
<schema name="json-package">
  <system>You are a Python programmer. You answer with a short program.</system>
  <user>
    These are files of the package json.
    <module name="scanner.py" src="scanner.py"/>
    <module name="tool.py" src="tool.py"/>
    <module name="decoder.py" src="decoder.py"/>
  </user>
</schema>
"""

PROMPT = """
<prompt schema="json-package">
  <scanner.py/>
  <tool.py/>
  Write a program that reads a file with one JSON text a line, and prints each line indented.
</prompt>
"""


def main() -> None:
    """Declare three files, and import the two that the question is about."""
    schema = parse_schema(SCHEMA, src_root=Path(json.__file__).parent)
    with PromptCache.from_pretrained("smollm2", config=ENGINE) as engine:
        layout = engine.add_schema(schema)
        print(f"schema {layout.name!r} reserves {len(layout.span)} position IDs")
        compare(engine, parse_prompt(PROMPT), max_new_tokens=32)


if __name__ == "__main__":
    main()
