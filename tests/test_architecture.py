"""The rules of the house, each held by a test, and each test shown that it can fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from tests.support import architecture as rules

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pc_rag"
ADAPTERS = (
    ROOT / "integrations/langchain/langchain_pc_rag",
    ROOT / "integrations/llama_index/llama_index/llms/pc_rag",
)
HEAVY = (
    *rules.TENSOR_LIBRARIES,
    "faiss",
    "lxml",
    "numpy",
    "rich",
    "safetensors",
    "sentence_transformers",
    "tokenizers",
    "typer",
)


def room_of(path: Path) -> str:
    """The room a file of the package belongs to; empty for the package's own ``__init__``."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def breaches(check, paths, *arguments) -> list[str]:
    """What ``check`` finds in the files, located."""
    return [
        f"{path.relative_to(ROOT)}:{breach.line}: {breach.what}"
        for path in paths
        for breach in check(path.read_text(encoding="utf-8"), *arguments)
    ]


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running ``statement``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


# -- imports ----------------------------------------------------------------------------------


@pytest.mark.parametrize("room", sorted({room_of(path) for path in sources(PACKAGE)} - {""}))
def test_imports_go_one_way_when_a_room_needs_another(room):
    """A room knows only rooms below it: errors, types, config <- pml <- ... <- cli."""
    found = []
    for path in sources(PACKAGE):
        if room_of(path) == room:
            package = ".".join(path.parent.relative_to(ROOT).parts)
            found += breaches(rules.import_order_breaches, [path], room, package)
    assert found == []


def order_breaches(room: str, source: str) -> list[rules.Breach]:
    """Breaches of a file that lies in a room's own folder."""
    return rules.import_order_breaches(source, room, f"pc_rag.{room}")


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("errors", "from pc_rag.types import Span"),
        ("types", "from pc_rag import errors"),
        ("metrics", "from pc_rag.kv.base import StoreStats"),
        ("pml", "import pc_rag.layout.plan"),
        ("layout", "def late():\n    from pc_rag.kv import key"),
        ("kv", "from ..model import runner"),
        ("layout", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pc_rag.kv"),
        ("engine", "from pc_rag import PromptCache"),
        ("quality", "import pc_rag"),
        ("model", "import importlib\nimportlib.import_module('pc_rag.engine')"),
        ("attic", "import os"),
    ],
)
def test_import_is_refused_when_it_goes_the_other_way(room, source):
    """The rule sees absolute, relative, late, annotation-only and dynamic imports."""
    assert len(order_breaches(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kv", "from pc_rag.errors import StoreError\nfrom . import key\nfrom .base import Lease"),
        ("engine", "from pc_rag import errors\nfrom pc_rag.metrics import CacheStats"),
        ("metrics", "if TYPE_CHECKING:\n    from pc_rag.kv.base import StoreStats"),
        ("cli", "from pc_rag import __version__\nimport pc_rag.corpus"),
    ],
)
def test_import_is_accepted_when_it_goes_down(room, source):
    """The rule does not refuse what the order allows."""
    assert order_breaches(room, source) == []


def test_relative_import_is_resolved_when_the_file_is_no_package_of_its_own():
    """``from .`` means the folder the file lies in, not the room's name."""
    assert rules.import_order_breaches("from .corpus import Corpus", "engine", "pc_rag") != []
    deep = "pc_rag.model.positions"
    assert rules.import_order_breaches("from ..loading import load", "model", deep) == []
    assert rules.import_order_breaches("from ...engine import x", "model", deep) != []


@pytest.mark.parametrize("room", ["config", "errors", "layout", "metrics", "pml", "types"])
def test_no_tensor_library_is_imported_when_a_pure_room_is(room):
    """Rooms of plain values start fast and can be tested without a model."""
    assert not modules_after(f"import pc_rag.{room}") & set(rules.TENSOR_LIBRARIES)
    paths = [path for path in sources(PACKAGE) if room_of(path) == room]
    assert breaches(rules.forbidden_imports, paths, rules.TENSOR_LIBRARIES) == []


def test_nothing_heavy_is_imported_when_the_package_is():
    """``import pc_rag`` does no work; its names load on first use."""
    assert not modules_after("import pc_rag") & set(HEAVY)


def test_imported_modules_are_seen_when_a_statement_loads_them():
    """The interpreter check is able to fail."""
    assert "json" in modules_after("import json.decoder")


def test_no_framework_is_imported_when_the_package_is_complete():
    """Frameworks come through the adapters, and the adapters' imports stay with them."""
    assert breaches(rules.forbidden_imports, sources(PACKAGE), rules.FRAMEWORKS) == []


@pytest.mark.parametrize(
    "source",
    [
        "import langchain_core.messages",
        "from llama_index.core import Settings",
        "def late():\n    import langsmith",
        "from pc_rag.errors import require\nrequire('langchain', feature='', extra='')",
    ],
)
def test_framework_is_refused_when_imported(source):
    """The rule sees every family, early or late."""
    assert len(rules.forbidden_imports(source, rules.FRAMEWORKS)) == 1


# -- source text ------------------------------------------------------------------------------


def test_no_assert_guards_when_a_user_or_a_disk_can_break_it():
    """``python -O`` drops asserts; a broken promise raises one of our errors."""
    assert breaches(rules.assert_breaches, sources(PACKAGE, *ADAPTERS)) == []


def test_nothing_is_printed_when_the_library_works():
    """Only the command line writes to the standard streams."""
    paths = [path for path in sources(PACKAGE, *ADAPTERS) if PACKAGE / "cli" not in path.parents]
    assert breaches(rules.print_breaches, paths) == []


def test_no_code_is_run_when_data_is_read():
    """Nothing is ever unpickled or evaluated."""
    assert breaches(rules.code_execution_breaches, sources(PACKAGE, *ADAPTERS)) == []


def test_no_cache_class_is_used_when_transformers_changes_them():
    """KV reaches us through the attention function; transformers' caches change too often."""
    assert breaches(rules.cache_class_breaches, sources(PACKAGE, *ADAPTERS)) == []


def test_attention_is_registered_in_one_file_when_transformers_changes():
    """``model/hf_attention.py`` alone touches transformers' attention interface."""
    naming = [
        path for path in sources(PACKAGE) if "_attn_implementation" in path.read_text("utf-8")
    ]
    assert naming == [PACKAGE / "model/hf_attention.py"]


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (rules.assert_breaches, "def f(x):\n    assert x"),
        (rules.print_breaches, "print('x')"),
        (rules.print_breaches, "show = print"),
        (rules.code_execution_breaches, "import pickle"),
        (rules.code_execution_breaches, "def late():\n    from joblib import load"),
        (rules.code_execution_breaches, "from torch import load"),
        (rules.code_execution_breaches, "weights = torch.load(path, weights_only=True)"),
        (rules.code_execution_breaches, "eval('1')"),
        (rules.code_execution_breaches, "exec('1')"),
        (rules.code_execution_breaches, "builtins.eval('1')"),
        (rules.code_execution_breaches, "numpy.load(path, allow_pickle=True)"),
        (rules.code_execution_breaches, "f(path, trust_remote_code=flag)"),
        (rules.cache_class_breaches, "from transformers import DynamicCache"),
        (rules.cache_class_breaches, "from transformers.cache_utils import Cache"),
        (rules.cache_class_breaches, "from transformers import cache_utils"),
        (rules.cache_class_breaches, "from transformers import StaticLayer"),
        (rules.cache_class_breaches, "if TYPE_CHECKING:\n    from transformers import Cache"),
        (rules.cache_class_breaches, "cache = transformers.DynamicCache()"),
    ],
)
def test_source_is_refused_when_it_breaks_a_rule(check, source):
    """Each checker finds the line that its rule forbids."""
    assert len(check(source)) == 1


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (rules.assert_breaches, "def assert_shape(x): '''assert'''"),
        (rules.print_breaches, "console.print('x')"),
        (rules.code_execution_breaches, "model.eval()\nsafetensors.torch.load(data)"),
        (rules.code_execution_breaches, "load(path, trust_remote_code=False)"),
        (rules.cache_class_breaches, "from pc_rag import PromptCache\nclass PrefixCache: ..."),
        (rules.cache_class_breaches, "from transformers import AutoModelForCausalLM"),
    ],
)
def test_source_is_accepted_when_it_only_looks_alike(check, source):
    """A rule that refuses good code would be worked around."""
    assert check(source) == []


# -- files ------------------------------------------------------------------------------------


def tracked_texts() -> dict[str, str]:
    """Every tracked text file of the repository by its path."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed: nothing says which files are ours")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.decode().strip()}")
    texts = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        if b"\0" not in data:
            texts[name] = data.decode("utf-8", "replace")
    return texts


def test_no_machine_is_named_when_a_file_is_tracked():
    """No home or workspace path and no package registry's host stands in the repository."""
    texts = tracked_texts()
    assert "pyproject.toml" in texts
    found = [
        f"{name}:{breach.line}: {breach.what}"
        for name, text in texts.items()
        for breach in rules.private_text_breaches(text)
    ]
    assert found == []


# Joined here, since the rule holds for this file too.
@pytest.mark.parametrize(
    "text",
    [
        "cd /" + "home/ada/pc-rag",
        'open("/' + 'Users/ada/x")',
        "PATH=/" + "root/bin",
        "see /" + "work/main",
        "file:///" + "home/ada/x",
        "-v x:/" + "workspace/x",
        "C:\\" + "Users\\ada",
        "pip install --index-" + "url http://10.0.0.1:8080/x",
        "url = 'https://files.python" + "hosted.org/x.whl'",
        "py" + "pi.org",
        "mirror: http://10.0.0.1:3141/sim" + "ple",
        "image: gh" + "cr.io/x",
    ],
)
def test_text_is_refused_when_it_names_a_machine(text):
    """Each kind of path and host is found."""
    assert rules.private_text_breaches(f"fine\n{text}\n")[0].line == 2


@pytest.mark.parametrize(
    "text",
    [
        "the project's homepage, docs/home/index.md, framework/work",
        "pypi.py, a simple /simple/ list, https://arxiv.org/abs/2311.04934",
        "work/life, ~/work/x, /workflows/x, https://example.org/home/x",
    ],
)
def test_text_is_accepted_when_it_names_no_machine(text):
    """Words that only resemble a path or a host pass."""
    assert rules.private_text_breaches(text) == []


@pytest.mark.parametrize("folder", ["llama_index", "llama_index/llms"])
def test_namespace_has_no_init_when_llama_index_shares_it(folder):
    """PEP 420: an ``__init__`` there would hide every other LlamaIndex distribution."""
    namespace = ROOT / "integrations/llama_index" / folder
    assert namespace.is_dir()
    assert not (namespace / "__init__.py").exists()


@pytest.mark.parametrize("package", [PACKAGE, *ADAPTERS], ids=lambda path: path.name)
def test_marker_is_present_when_a_package_is_typed(package):
    """Without ``py.typed`` users' type checkers ignore our annotations."""
    assert (package / "__init__.py").is_file()
    assert (package / "py.typed").is_file()


def test_dependency_has_a_reason_when_it_is_declared():
    """CONTRIBUTING.md justifies each package that an installation or an extra brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = chain(project["dependencies"], *project["optional-dependencies"].values())
    names = {re.match(r"[\w-]+", each)[0] for each in declared} - {project["name"]}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {name for name in names if not re.search(rf"\| .*\b{name}\b.* \| \w", text)} == set()
