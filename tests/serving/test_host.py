"""A model opened once, shared, and given back."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from pc_rag.config import EngineConfig
from pc_rag.errors import (
    ConfigError,
    GenerationError,
    GenerationTimeoutError,
    ModelError,
    StoreError,
)
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.sampling import GenerationConfig
from pc_rag.serving import Call, Host, HostSettings, open_host
from pc_rag.types import MissReason, Role
from tests.support.cli import save_tiny_model
from tests.support.corpora import CAT, DOG, chunk_uses
from tests.support.engines import scripted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("PC_RAG_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def call(*texts, **settings):
    prompt = [ChatMessage(Role.SYSTEM, "Use:\n" + "\n".join(texts)), ChatMessage(Role.USER, "?")]
    return Call(prompt=prompt, config=GenerationConfig(max_new_tokens=2), **settings)


def run(host, asked):
    with host.stream(asked) as stream:
        text = "".join(stream)
    assert stream.reply.text == text
    return stream.reply


def test_window_is_the_asked_one_before_and_after_the_model_is_opened(tmp_path):
    """LongRoPE has short factors for its original length, and long ones for all that it has."""
    folder = str(save_tiny_model(tmp_path, family="phi3"))
    plain = open_host(HostSettings(model=folder))
    long = open_host(HostSettings(model=folder, max_position=2048))
    assert (plain.max_position, long.max_position) == (1024, 2048)
    assert not long.is_open
    fingerprints = {host.engine.loaded.fingerprint for host in (plain, long)}
    assert (plain.max_position, long.max_position) == (1024, 2048)
    assert len(fingerprints) == 2


def test_host_is_shared_when_settings_are_equal(folder):
    """By all who hold it, and no longer: a model that nobody holds is forgotten."""
    settings = HostSettings(model=str(folder))
    first, second = open_host(settings), open_host(HostSettings(model=str(folder)))
    assert first is second
    assert (
        open_host(HostSettings(model=str(folder), config=EngineConfig(repair="link:1")))
        is not first
    )
    gone = weakref.ref(first)
    del first, second
    gc.collect()
    assert gone() is None


def test_model_is_loaded_once_when_threads_ask_at_the_same_time(folder):
    """One opens, the others wait for it."""
    host = open_host(HostSettings(model=str(folder)))
    barrier, found = threading.Barrier(4), []

    def ask():
        barrier.wait()
        found.append(host.corpus)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    host.hold().release()


def test_opening_is_tried_again_when_it_failed(tmp_path):
    """A missing model is an error each time, until it is there."""
    host = open_host(HostSettings(model=str(tmp_path / "tiny")))
    for _ in range(2):
        with pytest.raises(ModelError):
            _ = host.corpus
    save_tiny_model(tmp_path / "tiny")
    assert host.model_name == host.engine.loaded.name
    host.hold().release()


def test_host_opens_again_when_it_was_closed(folder, tmp_path):
    """What the store holds is there again."""
    host = open_host(HostSettings(model=str(folder), store=str(tmp_path)))
    hold = host.hold()
    host.corpus.add([CAT])
    first = run(host, call(CAT))
    hold.release()
    hold.release()
    assert not host.is_open
    again = run(host, call(CAT))
    assert [use.hit_kind for use in chunk_uses(again)] == ["composed"]
    assert first.text == again.text
    host.hold().release()


def test_host_stays_open_when_another_holds_it(folder):
    """Each releases its own hold; the last one closes, and one that is gone counts no more."""
    host = open_host(HostSettings(model=str(folder)))
    first, second, dropped = host.hold(), host.hold(), host.hold()
    corpus = host.corpus
    first.release()
    first.release()
    assert host.is_open
    assert corpus.stats()
    del dropped
    second.release()
    assert not host.is_open
    with pytest.raises(StoreError):
        corpus.stats()


def test_corpus_is_found_again_when_its_host_is_gone(folder):
    """A vector store may hold the corpus longer than anybody holds the model object."""
    settings = HostSettings(model=str(folder))
    corpus = open_host(settings).corpus
    gc.collect()
    host = open_host(settings)
    assert host.corpus is corpus
    host.hold().release()
    again = open_host(settings)
    assert again.corpus is not corpus
    again.hold().release()


def test_corpus_is_found_again_when_a_host_that_was_lent_it_is_closed(folder):
    """What was lent has the settings of what it was lent from, and takes nothing away from it."""
    settings = HostSettings(model=str(folder))
    corpus = open_host(settings).corpus
    gc.collect()
    lent = open_host(corpus)
    assert lent.settings == settings
    lent.hold().release()
    host = open_host(settings)
    assert host.corpus is corpus
    host.hold().release()


def test_lent_corpus_stays_open_when_the_host_is_closed(corpus):
    """It is its owner's."""
    host = open_host(corpus)
    host.hold().release()
    assert host.corpus is corpus
    assert run(host, call(CAT)).text


def test_sibling_shares_the_store_when_another_model_is_asked_for(folder, tmp_path):
    """Opened once; what the first model stored is not served to the second."""
    other = save_tiny_model(tmp_path / "other", seed=1)
    host = open_host(HostSettings(model=str(folder), store=str(tmp_path / "store")))
    host.corpus.add([CAT])
    sibling = host.sibling(str(other))
    assert host.sibling(str(other)) is sibling
    assert host.sibling(str(folder)) is host
    (use,) = chunk_uses(run(sibling, call(CAT)))
    assert use.miss_reason is not None
    (again,) = chunk_uses(run(sibling, call(CAT)))
    assert again.hit_kind == "composed"
    host.hold().release()
    assert not sibling.is_open


def test_sibling_stays_open_when_its_own_owner_holds_it(folder, tmp_path):
    """Whoever asked for it by another model's host does not own it alone."""
    other = save_tiny_model(tmp_path / "other", seed=1)
    own = open_host(HostSettings(model=str(other)))
    hold = own.hold()
    host = open_host(HostSettings(model=str(folder)))
    assert host.sibling(str(other)) is own
    assert own.corpus
    host.hold().release()
    assert own.is_open
    hold.release()
    assert not own.is_open


def test_sibling_is_refused_when_the_corpus_was_lent(corpus):
    """By both names."""
    with pytest.raises(ConfigError, match=r"model 'x' is not the model.*LlamaForCausalLM"):
        open_host(corpus).sibling("x")


def test_prefix_is_learned_once_when_calls_allow_it(corpus):
    """After a hit from behind another prefix; a second call has nothing to learn."""
    host = open_host(corpus)
    run(host, call(CAT))
    assert host.learning is None
    run(host, call(CAT, learn_prefix=True))
    learned = host.learning
    assert learned.result() == 3
    reply = run(host, call(CAT, DOG, learn_prefix=True))
    assert [use.miss_reason for use in chunk_uses(reply)] == [None, None]
    assert host.learning is learned


def test_answer_is_given_when_learning_fails(corpus, monkeypatch):
    """It was generated all the same; the failure is told where learning is asked after."""

    def fail(_prompt):
        message = "the medium failed"
        raise OSError(message)

    monkeypatch.setattr(corpus, "learn_prefix", fail)
    host = open_host(corpus)
    assert run(host, call(CAT, learn_prefix=True)).text
    with pytest.raises(OSError, match="the medium failed"):
        host.learning.result()


def test_nothing_is_learned_when_a_stream_was_left(corpus):
    """A request that nobody waited for says nothing about the prompts to come."""
    host = open_host(corpus)
    with scripted(corpus.engine, "a" * 50):
        asked = call(CAT, learn_prefix=True)
        stream = host.stream(Call(prompt=asked.prompt, learn_prefix=True))
        next(stream)
        stream.close()
    assert stream.reply.completion.metrics.is_cancelled
    assert host.learning is None


def test_reply_is_refused_when_the_stream_has_not_ended(corpus):
    """As that of the engine's own streams."""
    stream = open_host(corpus).stream(call(CAT))
    with pytest.raises(GenerationError, match="has not ended"):
        _ = stream.reply
    stream.close()


def test_stream_ends_at_once_when_nobody_holds_it(corpus):
    """No cycle keeps it: leases and buffers come back without a garbage collection."""
    host = open_host(corpus)
    gc.disable()
    try:
        stream = host.stream(Call(prompt=call(CAT).prompt))
        next(stream)
        del stream
        assert corpus.engine.stats.snapshot().total.requests["cancelled"] == 1
    finally:
        gc.enable()


def test_tokenizer_needs_no_weights_when_only_tokens_are_counted(folder):
    """Counting does not load the model."""
    host = Host(HostSettings(model=str(folder)))
    assert host.tokenizer.encode_text("abc") == (97, 98, 99)
    assert not host.is_open


def test_miss_is_told_when_reuse_is_off(corpus):
    """The uncached arm of a comparison."""
    reply = run(open_host(corpus), call(CAT, reuse=False))
    assert [use.miss_reason for use in chunk_uses(reply)] == [MissReason.REUSE_OFF]


def test_call_ends_when_its_time_is_over(corpus):
    """With an error that is a ``TimeoutError`` too; and it stays ended."""
    stream = open_host(corpus).stream(call(CAT, timeout_seconds=1e-9))
    with pytest.raises(GenerationTimeoutError, match="timeout of 1e-09 s") as caught:
        next(stream)
    assert isinstance(caught.value, TimeoutError)
    assert list(stream) == []


def test_template_is_the_calls_when_it_names_one(corpus):
    """Metrics are told apart by it."""
    assert run(open_host(corpus), call(CAT, template="x")).completion.metrics.template == "x"


def test_folder_is_the_command_lines_when_a_store_is_opened(folder, tmp_path):
    """Catalog and entries lie where ``pc-rag --store`` looks for them."""
    host = open_host(HostSettings(model=str(folder), store=str(tmp_path)))
    host.corpus.add([CAT])
    host.hold().release()
    assert (tmp_path / "catalog.sqlite").is_file()
    assert any((tmp_path / "kv").rglob("*.safetensors"))


def test_engine_is_closed_when_its_host_is_released(folder, tmp_path):
    """What the host opened: the store's files are free for another process."""
    host = open_host(HostSettings(model=str(folder), store=str(tmp_path)))
    hold, closed = host.hold(), []
    engine, close = host.engine, host.engine.close

    def closing():
        closed.append(True)
        close()

    engine.close = closing
    hold.release()
    assert closed == [True]


def test_engine_stays_open_when_it_was_lent(corpus):
    """Only the corpus around it was the host's own."""
    engine, closed = corpus.engine, []
    engine.close = lambda: closed.append(True)
    host = open_host(engine)
    hold = host.hold()
    assert run(host, call(CAT)).text
    hold.release()
    del engine.close
    assert closed == []


def test_host_is_described_when_its_small_files_were_read(folder):
    """Or when the model is open; asking reads nothing."""
    host = Host(HostSettings(model=str(folder)))
    assert not host.is_described
    assert host.chat_format.has_template
    assert not host.is_described
    assert host.max_position == 2048
    assert host.is_described
    assert not host.is_open


def test_lent_engine_tells_about_itself_when_it_was_not_used_yet(corpus):
    """Its name is no folder in which anything could be looked up."""
    host = open_host(corpus.engine)
    assert host.is_described
    assert host.max_position == corpus.engine.max_position
    assert host.tokenizer is corpus.engine.loaded.tokenizer
    assert host.chat_format is corpus.engine.chat_format
    assert not host.is_open
