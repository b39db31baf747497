"""Two models under one chain: alternating, measured behind a warm-up, with hits and answers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langchain_pc_rag import compare_chains
from langchain_pc_rag.answers import AnswerText
from langchain_pc_rag.compare import Arm
from langchain_pc_rag.compare_command import main

from pc_rag.errors import ConfigError, GenerationError
from pc_rag.types import MissReason
from tests.support.langchain_models import ListRetriever, SilentChat, SpeakingChat
from tests.support.metrics import FakeClock
from tests.support.uses import TEXTS, metrics_of, use_of

METRICS = metrics_of(use_of(TEXTS[0]), use_of(TEXTS[1], MissReason.NOT_STORED))
QUESTIONS = ("Where is Oslo?", "Where is Lima?")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def models(clock):
    """The candidate is four times faster, and answers otherwise."""
    return {
        "baseline": SpeakingChat(clock=clock, prefill=4.0),
        "candidate": SpeakingChat(clock=clock, prefill=1.0, metrics=METRICS, pieces=("It ", "is.")),
    }


def build(model):
    return ListRetriever() | RunnableLambda(str) | model | StrOutputParser()


def compared(models, clock, **changes):
    options = {"read_clock": clock, **models, **changes}
    return compare_chains(options.pop("build", build), QUESTIONS, **options)


def test_times_hits_and_answers_are_side_by_side_when_compared(models, clock):
    """Each question has both medians, their ratio, the hit rate and both answers."""
    comparison = compared(models, clock)
    assert [result.question for result in comparison.results] == list(QUESTIONS)
    for each in (*comparison.results, comparison):
        assert (each.baseline_ttft_seconds, each.candidate_ttft_seconds) == (4.0, 1.0)
        assert each.ttft_ratio == 4.0
        assert each.hit_rate == 0.5
    first = comparison.results[0]
    assert (first.baseline_answer, first.candidate_answer) == ("Norway.", "It is.")
    assert comparison.samples[0].run.num_documents == 3


def test_first_round_is_reported_and_in_no_median_when_it_was_slow(models, clock):
    """What loads and compiles first does not decide."""
    told = []

    def warm(text):
        told.append(text)
        slow = text.startswith("round 1 ")
        models["candidate"].prefill = 100.0 if slow else 1.0

    comparison = compared(models, clock, rounds=2, on_progress=warm)
    assert comparison.candidate_ttft_seconds == 1.0
    warm_up = [each for each in comparison.samples if each.is_warm_up]
    assert [each.ttft_seconds for each in warm_up if each.arm == "candidate"] == [100.0, 100.0]
    assert "100.00 s" in comparison.table()
    assert told[0] == "round 1 of 2, question 1, baseline"
    assert len(told) == 8


def test_models_take_turns_when_compared(models, clock):
    """Neither is always the first, nor asked in a row of its own."""
    samples = compared(models, clock).samples
    asked = [(each.round_number, each.question_index, each.arm.value[0]) for each in samples]
    assert asked == [
        (0, 0, "b"), (0, 0, "c"), (0, 1, "c"), (0, 1, "b"),
        (1, 0, "c"), (1, 0, "b"), (1, 1, "b"), (1, 1, "c"),
        (2, 0, "b"), (2, 0, "c"), (2, 1, "c"), (2, 1, "b"),
    ]  # fmt: skip


def test_chain_is_built_once_when_there_are_many_rounds(models, clock):
    """A factory may load an index; it is called for each model once."""
    built = []

    def once(model):
        built.append(model)
        return build(model)

    compared(models, clock, build=once, rounds=4)
    assert built == [models["baseline"], models["candidate"]]


def test_ratio_is_unknown_when_a_model_does_not_stream(models, clock):
    """No first token is not a time of zero; the whole time is still there."""
    comparison = compared({**models, "baseline": SilentChat(clock=clock)}, clock)
    assert comparison.baseline_ttft_seconds is None
    assert comparison.ttft_ratio is None
    assert "not streamed" in comparison.table()
    assert comparison.measured(Arm.BASELINE)[0].total_seconds == 3.0


def test_table_explains_when_there_was_nothing_to_hit(models, clock):
    """A candidate without metrics is no cache with a rate of zero."""
    models["candidate"].metrics = None
    comparison = compared(models, clock)
    assert comparison.hit_rate is None
    assert "it is another model" in comparison.table()


def test_table_names_the_reasons_when_modules_were_missed(models, clock):
    """Misses of the measured rounds, with what they mean."""
    assert "4  not-stored: no entry was stored" in compared(models, clock).table()


def test_dictionary_is_json_when_compared(models, clock):
    """Results and raw samples survive JSON."""
    plain = compared(models, clock).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["questions"][1]["ttft_ratio"] == 4.0
    assert len(plain["samples"]) == 12


@pytest.mark.parametrize("as_dictionary", [lambda t: {"answer": t}, lambda t: {"result": t}])
def test_answer_is_found_when_a_chain_returns_a_dictionary(models, clock, as_dictionary):
    """The key that chains of LangChain put it under."""

    def build_dictionary(model):
        return build(model) | RunnableLambda(as_dictionary)

    results = compared(models, clock, build=build_dictionary).results
    assert results[0].candidate_answer == "It is."


def test_answer_is_found_when_the_chain_ends_in_a_model_or_an_agent(models, clock):
    """Messages, and the updates of a graph."""
    question = {"as_input": lambda text: {"messages": [("user", text)]}}
    for factory, options in ((lambda model: model, {}), (create_agent, question)):
        results = compared(models, clock, build=factory, **options).results
        assert results[0].candidate_answer == "It is."


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        (["a", "b"], "ab"),
        ([AIMessageChunk("a"), AIMessageChunk([{"type": "text", "text": "b"}])], "ab"),
        ([AIMessage("whole")], "whole"),
        ([{"context": []}, {"answer": "a"}, {"answer": "b"}], "ab"),
        ([{"answer": AIMessageChunk("a")}, {"answer": AIMessageChunk("b")}], "ab"),
        ([{"model": {"messages": [AIMessage("no")]}}, {"x": {"messages": [AIMessage("b")]}}], "b"),
        ([{"messages": [("user", "?"), AIMessage("b")]}], "b"),
        ([{"node": None}, {"other": 3}, None], ""),
        ([1, 2], "2"),
        ([], ""),
    ],
)
def test_answer_is_gathered_when_pieces_come(pieces, answer):
    """Whatever a chain streams, there is a text to compare."""
    text = AnswerText()
    for piece in pieces:
        text.add(piece)
    assert text.value == answer


def test_failure_says_where_when_a_chain_raises(models, clock):
    """The round, the question, the model and the cause."""
    models["candidate"].fail_at = 0
    with pytest.raises(
        GenerationError, match=r"question 1, candidate.*ZeroDivisionError"
    ) as caught:
        compared(models, clock)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("questions", "rounds", "message"),
    [((), 3, "there is no question"), (QUESTIONS, 1, "rounds is 1; it must be at least 2")],
)
def test_input_is_refused_when_nothing_could_be_measured(models, questions, rounds, message):
    """Before any model is asked."""
    with pytest.raises(ConfigError, match=message):
        compare_chains(build, questions, rounds=rounds, **models)


# -- the command line -------------------------------------------------------------------------

CHAIN = """
from tests.support.langchain_models import *
from tests.support.uses import TEXTS, metrics_of, use_of
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

METRICS = metrics_of(use_of(TEXTS[0]))
baseline = SpeakingChat(pieces=("slow",))

def candidate():
    return SpeakingChat(pieces=("fast",), metrics=METRICS)

class holder:
    model = SpeakingChat(pieces=("held",))

def broken():
    raise OSError("no weights")

failing = SpeakingChat(fail_at=0)
number = 3

def build(model):
    return RunnableLambda(str) | model | StrOutputParser()

def build_keyed(model):
    return RunnableLambda(lambda given: given["query"]) | build(model)
"""


@pytest.fixture
def command(tmp_path, monkeypatch, request):
    """Runs the command beside a module with chains; gives exit code, stdout and stderr."""
    name = f"mychain_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(CHAIN)
    (tmp_path / "questions.txt").write_text("Where is Oslo?\n\n  Where is Lima?  \n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(build="build", baseline="baseline", candidate="candidate", *extra):
        arguments = [f"{name}:{build}", f"--baseline={name}:{baseline}"]
        arguments += [f"--candidate={name}:{candidate}", "--questions=questions.txt", *extra]
        return main(arguments)

    run.module = name
    return run


def test_table_is_on_stdout_when_the_command_runs(command, capsys):
    """Results for a pipe, progress for the person."""
    assert command() == 0
    shown = capsys.readouterr()
    assert "Where is Lima?" in shown.out
    assert "candidate: fast" in shown.out
    assert "warm-up" in shown.out
    assert "round 3 of 3, question 2" in shown.err
    assert "round" not in shown.out.partition("\n")[2]


def test_json_is_on_stdout_when_asked_for(command, capsys):
    """One document, whole."""
    assert command("build", "baseline", "holder.model", "--json", "--rounds=2") == 0
    plain = json.loads(capsys.readouterr().out)
    assert [each["candidate_answer"] for each in plain["questions"]] == ["held", "held"]
    assert len(plain["samples"]) == 8


def test_question_has_its_key_when_the_chain_takes_a_dictionary(command):
    """Chains of LangChain name their input differently."""
    assert command("build_keyed", "baseline", "candidate", "--input-key=query") == 0
    assert command("build_keyed") == 3


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nothing", "baseline", "candidate"), "has no 'nothing'"),
        (("number", "baseline", "candidate"), "expected a function that makes a chain"),
        (("build", "baseline", "holder.nothing"), "has no 'holder.nothing'"),
    ],
)
def test_name_is_refused_when_the_module_lacks_it(command, capsys, names, message):
    """Exit code 1, and the name in the message."""
    assert command(*names) == 1
    assert message in capsys.readouterr().err


def test_module_is_refused_when_it_is_not_found(command, capsys, tmp_path):
    """A module that is not there is told from one that needs another."""
    arguments = [f"--baseline={command.module}:baseline", "--candidate=x:y", "--questions=q"]
    assert main(["no_such_module:build", *arguments]) == 1
    assert "there is no module 'no_such_module'" in capsys.readouterr().err
    (tmp_path / "needy.py").write_text("import no_such_dependency")
    assert main(["needy:build", *arguments]) == 1
    assert "no module named 'no_such_dependency'; install it" in capsys.readouterr().err
    assert main(["no-colon", *arguments]) == 1
    assert "is not MODULE:NAME" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe", None])
def test_questions_are_refused_when_there_are_none(command, capsys, tmp_path, content):
    """An empty, unreadable or absent file."""
    path = tmp_path / "questions.txt"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert command() == 1
    assert "questions.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("candidate", "message"), [("failing", "ZeroDivisionError"), ("broken", "OSError: no weights")]
)
def test_exit_code_is_three_when_a_model_fails(command, capsys, candidate, message):
    """While it answers, or already while it is made."""
    assert command("build", "baseline", candidate) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("extra", ["--rounds=1", "--rounds=x", "--unknown"])
def test_exit_code_is_two_when_usage_is_wrong(command, extra):
    """As argparse has it."""
    with pytest.raises(SystemExit) as caught:
        command("build", "baseline", "candidate", extra)
    assert caught.value.code == 2


def test_module_runs_as_a_command(tmp_path):
    """``python -m langchain_pc_rag.compare`` is the way in."""
    done = subprocess.run(
        [sys.executable, "-m", "langchain_pc_rag.compare", "no_such_module:build",
         "--baseline=a:b", "--candidate=a:b", "--questions=q"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "error: no_such_module:build: there is no module 'no_such_module'; run the command where "
        "it can be imported\n"
    )
