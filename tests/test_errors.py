"""Errors survive pickling and say where they happened."""

from __future__ import annotations

import pickle

import pytest

from pc_rag import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.SchemaError((errors.Problem(3, 7, "duplicate name 'a'"),), "travel.xml"),
        errors.PromptError("nothing to generate from"),
        errors.UnsupportedModelError("no RoPE", "MambaForCausalLM", "position encoding"),
        errors.MissingDependencyError("reading PDF", "documents"),
        errors.MissingDependencyError("agents", "agents", "langchain-pc-rag"),
        errors.StoreFull("10 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_message_survives_when_an_error_is_pickled(error):
    """Errors cross process borders with their message and attributes."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_problem_is_located_when_a_document_is_refused():
    """A document error names the source, line and column of every problem."""
    error = errors.SchemaError(
        (errors.Problem(3, 7, "duplicate name"), errors.Problem(9, 0, "no name")), "travel.xml"
    )
    assert str(error) == "travel.xml: line 3, column 7: duplicate name\ntravel.xml: line 9: no name"


def test_every_error_is_a_runtime_error_when_frameworks_catch_value_errors():
    """LlamaIndex swallows ValueError and TypeError, so none of ours may be one."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    assert len(kinds) > 10
    assert all(issubclass(kind, errors.PromptCacheError) for kind in kinds)
    assert not any(issubclass(kind, (ValueError, TypeError)) for kind in kinds)


def test_missing_extra_is_named_when_an_optional_package_is_absent():
    """The message tells what to install."""
    with pytest.raises(errors.MissingDependencyError, match=r"pc-rag\[documents\]"):
        errors.require("no_such_module_here", feature="reading PDF", extra="documents")
    with pytest.raises(errors.MissingDependencyError, match=r"'langchain-pc-rag\[agents\]'"):
        errors.require(
            "no_such_module_here",
            feature="middleware",
            extra="agents",
            distribution="langchain-pc-rag",
        )
